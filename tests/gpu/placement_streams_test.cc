// One file, though long: how calls are ordered with what is queued on devices. Nothing is read
// before it is written, on either side, and nothing waits longer than it must. Over the double of
// CUDA.

#include <atomic>
#include <set>

#include "tests/gpu/device_test.h"

namespace placement_streams_test {  // its functions are registered under their full names
namespace {

using namespace stitch::testing::device_names;  // NOLINT

at::Tensor cuda(int index, float value, at::IntArrayRef sizes = {2, 3}) {
  return filled(index, value, sizes);
}

int plus_one(int value) { return value + 1; }
at::Tensor same(at::Tensor tensor) { return tensor; }
std::int64_t stream_of_handler(const at::Tensor& tensor) {
  return fake::current_stream(tensor.device()).id();
}

class DeviceStreams : public ::testing::TestWithParam<std::int64_t> {
 protected:
  // Inline and staged.
  [[nodiscard]] std::vector<std::int64_t> sizes() const { return {GetParam()}; }
};
INSTANTIATE_TEST_SUITE_P(FewAndManyBytes, DeviceStreams, ::testing::Values(8, 100'000));

TEST_P(DeviceStreams, ACallCarriesWhatTheCallersStreamHasStillToCompute) {
  Cluster cluster(2, worker0_maps);
  const c10::StreamGuard mine(fake::pool_stream(device(0)));
  const at::Tensor tensor = cuda(0, 1, sizes());
  fake::Hold hold(fake::current_stream(device(0)));
  fake::fill_later(tensor, 7);
  const auto result = rpc_async<same>("worker1", tensor);
  EXPECT_EQ(rpc_sync<plus_one>("worker1", 1), 2);  // other calls pass
  EXPECT_FALSE(result.ready());
  hold.release();
  EXPECT_TRUE(all_are(result.get(), 7));
}

TEST(DeviceStreamsOfCallers, FewBytesMayBeChangedByWhatIsQueuedAfterTheCall) {
  Cluster cluster(2, worker0_maps);
  const at::Tensor tensor = cuda(0, 0);
  fake::Hold hold(fake::current_stream(device(0)));
  fake::fill_later(tensor, 1);
  const auto result = rpc_async<same>("worker1", tensor);
  fake::fill_later(tensor, 2);
  hold.release();
  EXPECT_TRUE(all_are(result.get(), 1));
  EXPECT_TRUE(all_are(tensor, 2));
}

TEST_P(DeviceStreams, AnArgumentMayBeDroppedOnceItsCallIsMade) {
  Cluster cluster(2, worker0_maps);
  fake::Hold hold(device(0));
  Future<at::Tensor> result = [&] {
    const at::Tensor tensor = at::empty(sizes(), at::TensorOptions().device(device(0)));
    fake::fill_later(tensor, 3);
    return rpc_async<same>("worker1", tensor);
  }();
  hold.release();
  EXPECT_TRUE(all_are(result.get(), 3));
}

TEST_P(DeviceStreams, AHandlerRunsOnceItsArgumentsAreOnTheirDevice) {
  Cluster cluster(2, worker0_maps);
  const at::Tensor tensor = cuda(0, 4, sizes());
  fake::Hold hold(device(1));
  const auto result = rpc_async<stream_of_handler>("worker1", tensor);
  ASSERT_TRUE(eventually([] { return fake::has_queued_work(device(1)); }));
  EXPECT_EQ(rpc_sync<plus_one>("worker1", 1), 2);
  EXPECT_FALSE(result.ready());
  hold.release();
  EXPECT_NE(result.get(), 0);
}

TEST_P(DeviceStreams, AResultIsThereOnceItIsOnItsDevice) {
  Cluster cluster(2, worker0_maps);
  const at::Tensor tensor = on(device(1), at::full(sizes(), 6.0)).tensor();
  const auto result = rpc_async<same>("worker1", on("cuda:1", tensor));
  const at::Tensor here = result.get();  // both sides have touched their devices
  fake::Hold hold(device(0));
  const auto second = rpc_async<same>("worker1", on("cuda:1", tensor));
  ASSERT_TRUE(eventually([] { return fake::has_queued_work(device(0)); }));
  EXPECT_FALSE(second.wait_for(0ms));
  hold.release();
  EXPECT_TRUE(all_are(second.get(), 6));
}

fake::Hold* held_by_handler = nullptr;
at::Tensor filled_later(at::Tensor tensor) {
  held_by_handler = new fake::Hold(fake::current_stream(tensor.device()));
  fake::fill_later(tensor, 9);
  return tensor;
}

TEST_P(DeviceStreams, AResultCarriesWhatTheHandlersStreamHasStillToCompute) {
  Cluster cluster(2, worker0_maps);
  const auto result = rpc_async<filled_later>("worker1", cuda(0, 1, sizes()));
  ASSERT_TRUE(eventually([] { return fake::has_queued_work(device(1)); }));
  EXPECT_EQ(rpc_sync<plus_one>("worker1", 1), 2);
  EXPECT_FALSE(result.ready());
  delete held_by_handler;
  EXPECT_TRUE(all_are(result.get(), 9));
}

at::Tensor global_tensor;
void fill_global_later(const at::Tensor& by) {
  held_by_handler = new fake::Hold(fake::current_stream(by.device()));
  fake::fill_later(global_tensor, 5);
}

TEST(DeviceStreamsOfHandlers, AnAnswerMeansThatWhatTheHandlerQueuedHasEnded) {
  Cluster cluster(2, worker0_maps);
  global_tensor = cuda(1, 0);
  const auto done = rpc_async<fill_global_later>("worker1", cuda(0, 1));
  ASSERT_TRUE(eventually([] { return fake::has_queued_work(device(1)); }));
  EXPECT_FALSE(done.ready());
  delete held_by_handler;
  done.get();
  EXPECT_TRUE(all_are(global_tensor, 5));
  global_tensor = at::Tensor();
}

std::atomic<int> handlers_inside{0};

std::int64_t stream_beside_another(const at::Tensor& tensor) {
  ++handlers_inside;
  EXPECT_TRUE(eventually([] { return handlers_inside == 2; }));
  return stream_of_handler(tensor);
}

TEST(DeviceStreamsOfHandlers, EachHasAStreamOfItsOwn) {
  Cluster cluster(2, worker0_maps);
  handlers_inside = 0;
  auto first = rpc_async<stream_beside_another>("worker1", cuda(0, 1));
  auto second = rpc_async<stream_beside_another>("worker1", cuda(0, 1));
  EXPECT_NE(first.get(), 0);
  EXPECT_NE(second.get(), 0);
  EXPECT_NE(first.get(), second.get());
}

// libtorch's allocator and cuBLAS keep memory for each stream that is used. The next call may come
// before the one before it has given its stream back.
TEST(DeviceStreamsOfHandlers, OneAfterTheOtherUseFewStreams) {
  Cluster cluster(2, worker0_maps);
  std::set<std::int64_t> streams;
  for (int i = 0; i < 100; ++i) streams.insert(rpc_sync<stream_of_handler>("worker1", cuda(0, 1)));
  EXPECT_LE(streams.size(), 4U);
  EXPECT_FALSE(streams.contains(0));
}

std::int64_t stream_of_device(const at::Tensor&, int index) {
  return fake::current_stream(device(index)).id();
}

TEST(DeviceStreamsOfHandlers, ThatGetTensorsOnDevicesAreOfEachDeviceInUseAndOthersAreDefaultOnes) {
  Cluster cluster(2, worker0_maps);
  // In use from now on.
  static_cast<void>(rpc_sync<stream_of_device>("worker1", on("cuda:2", at::ones(3)), 2));
  for (const int index : {1, 2}) {
    EXPECT_NE(rpc_sync<stream_of_device>("worker1", cuda(0, 1), index), 0);
    EXPECT_EQ(rpc_sync<stream_of_device>("worker1", at::ones(3), index), 0);
  }
}

Future<bool> keeps_its_stream(at::Tensor tensor) {
  const auto before = fake::current_stream(tensor.device());
  const int two = co_await rpc_async<plus_one>("worker0", 1);
  co_return two == 2 && before.id() != 0 && fake::current_stream(tensor.device()) == before;
}

TEST(DeviceStreamsOfHandlers, ACoroutineKeepsItsStreamAcrossCoAwait) {
  Cluster cluster(2, worker0_maps);
  EXPECT_TRUE(rpc_sync<keeps_its_stream>("worker1", cuda(0, 1)));
}

at::Tensor copy_of_global(const at::Tensor&) { return global_tensor.clone(); }

TEST(DeviceStreamsOfHandlers, WhatTheDefaultStreamHadQueuedBeforeIsSeen) {
  Cluster cluster(2, worker0_maps);
  static_cast<void>(rpc_sync<same>("worker1", cuda(0, 1)));  // the device is in use
  global_tensor = cuda(1, 0);
  fake::Hold hold(fake::default_stream(device(1)));
  fake::fill_later(global_tensor, 8);
  const auto result = rpc_async<copy_of_global>("worker1", cuda(0, 1));
  EXPECT_FALSE(result.wait_for(20ms));
  hold.release();
  EXPECT_TRUE(all_are(result.get(), 8));
  global_tensor = at::Tensor();
}

bool uses_its_stream(const at::Tensor& tensor) {
  const auto recorded = fake::recorded_streams(tensor);
  return std::count(recorded.begin(), recorded.end(), fake::current_stream(tensor.device())) > 0;
}

Future<bool> is_kept_after_co_await(at::Tensor tensor) {
  const at::Tensor result = co_await rpc_async<same>("worker1", tensor);
  co_return uses_its_stream(result);
}

TEST(DeviceStreamsOfReceivers, MemoryIsKeptForTheStreamThatUsesIt) {
  Cluster cluster(2, worker0_maps);
  EXPECT_TRUE(rpc_sync<uses_its_stream>("worker1", cuda(0, 1)));
  const c10::StreamGuard mine(fake::pool_stream(device(0)));
  EXPECT_TRUE(uses_its_stream(rpc_sync<same>("worker1", cuda(0, 1))));
  const auto then = rpc_async<same>("worker1", cuda(0, 1)).then([](const at::Tensor& result) {
    return uses_its_stream(result);
  });
  EXPECT_TRUE(then.get());
  EXPECT_TRUE(is_kept_after_co_await(cuda(0, 1)).get());
}

// Where its value is taken, and not where the last member arrived.
TEST(DeviceStreamsOfReceivers, MemoryOfAGroupIsKeptForTheStreamThatUsesIt) {
  Cluster cluster(2, worker0_maps);
  const auto call = [] { return rpc_async<same>("worker1", cuda(0, 1)); };
  const auto one = rpc_async<plus_one>("worker1", 1);
  const stitch::Promise<int> never;
  const auto all = stitch::when_all(std::vector{call(), call(), call()});
  const auto both = stitch::when_all(call(), one, call());
  const auto alone = stitch::when_all(one, call());
  const auto any = stitch::when_any(std::vector{call(), call()});
  const auto either = stitch::when_any(call(), never.future());
  EXPECT_TRUE(all.wait_for(20s));
  EXPECT_TRUE(both.wait_for(20s));
  EXPECT_TRUE(alone.wait_for(20s));
  EXPECT_TRUE(any.wait_for(20s));
  EXPECT_TRUE(either.wait_for(20s));
  const c10::StreamGuard mine(fake::pool_stream(device(0)));
  for (const at::Tensor& result : all.get()) EXPECT_TRUE(uses_its_stream(result));
  EXPECT_TRUE(uses_its_stream(std::get<0>(both.get())));
  EXPECT_TRUE(uses_its_stream(std::get<2>(both.get())));
  EXPECT_TRUE(uses_its_stream(std::get<1>(alone.get())));
  EXPECT_TRUE(uses_its_stream(any.get().second));
  EXPECT_TRUE(uses_its_stream(std::get<0>(either.get())));
  const auto then = stitch::when_all(call(), call()).then([](const auto& results) {
    return uses_its_stream(std::get<0>(results)) && uses_its_stream(std::get<1>(results));
  });
  EXPECT_TRUE(then.get());
}

TEST(DeviceStreamsOfReceivers, AContinuationRunsUnderTheStreamsItWasAddedUnder) {
  Cluster cluster(2, worker0_maps);
  static_cast<void>(rpc_sync<same>("worker1", cuda(0, 1)));
  const c10::StreamGuard mine(fake::pool_stream(device(0)));
  const auto stream = rpc_async<plus_one>("worker1", 1).then([](int) {
    return fake::current_stream(device(0)).id();
  });
  EXPECT_EQ(stream.get(), fake::current_stream(device(0)).id());
}

struct Counter {
  at::Tensor value;
  Counter() = default;
  explicit Counter(at::Tensor initial) : value(std::move(initial)) {}
  at::Tensor add(const at::Tensor& more) {
    value.add_(more);
    return value.clone();
  }
};
// A table whose rows are filled by what a call queues and leaves there.
struct Table {
  at::Tensor value;
  Table() : value(cuda(1, 0)) {}
  void fill_later(const at::Tensor& by) const {
    held_by_handler = new fake::Hold(fake::current_stream(by.device()));
    fake::fill_later(value, 5);
  }
  // Under the default streams, which no call has made wait for those of another.
  [[nodiscard]] bool is_full() const { return all_are(value, 5); }
};

TEST(DeviceStreamsOfHandlers, TurnsEndWhenWhatTheMethodQueuedHasEnded) {
  Cluster cluster(2, worker0_maps);
  const auto table = stitch::remote<stitch::Serialized<Table>>("worker1");
  const auto first = table.rpc_async<&Table::fill_later>(cuda(0, 1));
  ASSERT_TRUE(eventually([] { return fake::has_queued_work(device(1)); }));
  const auto second = table.rpc_async<&Table::is_full>();
  EXPECT_EQ(rpc_sync<plus_one>("worker1", 1), 2);
  EXPECT_FALSE(second.ready());
  delete held_by_handler;
  first.get();
  EXPECT_TRUE(second.get()) << "it ran before what the first had queued";
}

at::Tensor sum(const std::vector<at::Tensor>& tensors) {
  at::Tensor total = tensors.front().clone();
  for (std::size_t i = 1; i < tensors.size(); ++i) total.add_(tensors[i]);
  return total;
}

TEST(DeviceStreamsUnderLag, ManyCallsAtOnceGiveWhatTheyGiveOnTheCpu) {
  Cluster cluster(3, worker0_maps);
  for (int round = 1; round <= 3; ++round) {
    std::vector<Future<at::Tensor>> results;
    for (int i = 0; i < 24; ++i) {
      const std::int64_t size = i % 3 == 0 ? 50'000 : 5;
      const auto value = static_cast<float>(i);
      const std::string to = "worker" + std::to_string(1 + i % 2);
      results.push_back(rpc_async<sum>(
          to, std::vector{cuda(0, value, {size}), cuda(0, 1, {size}), cuda(0, 2, {size})}));
    }
    for (int i = 0; i < 24; ++i)
      EXPECT_TRUE(all_are(results[static_cast<std::size_t>(i)].get(), static_cast<float>(i + 3)));
  }
}

TEST(DeviceStreamsUnderLag, AnObjectSeesCallsInTheOrderOfTheirAnswers) {
  Cluster cluster(2, worker0_maps);
  const auto counter = stitch::remote<Counter>("worker1", cuda(0, 1));
  for (int i = 1; i <= 8; ++i) {
    const at::Tensor value = counter.rpc_sync<&Counter::add>(cuda(0, 2));
    EXPECT_TRUE(all_are(value, static_cast<float>(1 + 2 * i)));
  }
}

TEST(DeviceFailures, MemoryThatIsShortAtTheReceiverFailsThatCallByName) {
  Cluster cluster(2, worker0_maps);
  const at::Tensor tensor = cuda(0, 1);
  const at::Tensor large = cuda(0, 1, {100'000});
  for (const auto& each : {tensor, large}) {
    fake::fail_allocations(1);
    const auto error = error_of([&] { static_cast<void>(rpc_sync<same>("worker1", each)); });
    EXPECT_TRUE(has_text(error, ErrorCode::overloaded, "tensor 1 of 1 ("));
    EXPECT_TRUE(has_text(error, ErrorCode::overloaded,
                         "could not be put on device cuda:1 of worker \"worker1\": CUDA out of"));
    EXPECT_TRUE(error.remote());
  }
  EXPECT_TRUE(all_are(rpc_sync<same>("worker1", tensor), 1));
}

at::Tensor made_here(int index) { return cuda(index, 2); }

TEST(DeviceFailures, MemoryThatIsShortForAResultFailsItsCall) {
  Cluster cluster(2, worker0_maps);
  const auto result = [] { static_cast<void>(rpc_sync<made_here>("worker1", 1)); };
  result();
  const at::Tensor made = made_here(1);
  fake::Hold hold(device(1));
  const auto late = rpc_async<same>("worker1", on("cuda:1", at::ones(3)));
  ASSERT_TRUE(eventually([] { return fake::has_queued_work(device(1)); }));
  fake::fail_allocations(1);
  hold.release();
  const auto error = error_of([&] { static_cast<void>(late.get()); });
  EXPECT_TRUE(has_text(error, ErrorCode::overloaded, "device cuda:0 of worker \"worker0\""));
  EXPECT_TRUE(all_are(rpc_sync<made_here>("worker1", 1), 2));
}

TEST(DeviceFailures, ADeviceThatFailsDoesNotStopCallsOfCpuTensors) {
  Cluster cluster(2, worker0_maps);
  const at::Tensor tensor = cuda(0, 1);
  static_cast<void>(rpc_sync<same>("worker1", tensor));
  fake::break_device(1);
  const auto error = error_of([&] { static_cast<void>(rpc_sync<same>("worker1", tensor)); });
  EXPECT_TRUE(has_text(error, ErrorCode::internal, "cuda:1"));
  EXPECT_TRUE(has_text(error, ErrorCode::internal, "an illegal memory access"));
  EXPECT_TRUE(at::equal(rpc_sync<same>("worker1", at::ones(3)), at::ones(3)));
  fake::heal();
}

TEST(DeviceFailures, ADeviceThatFailsWhileAResultWaitsIsTheErrorOfTheCall) {
  Cluster cluster(2, worker0_maps);
  const auto result = rpc_async<filled_later>("worker1", cuda(0, 1));
  ASSERT_TRUE(eventually([] { return fake::has_queued_work(device(1)); }));
  fake::break_device(1);
  const auto error = error_of([&] { static_cast<void>(result.get()); });
  EXPECT_TRUE(has_text(error, ErrorCode::internal, "its result cannot be sent: "));
  EXPECT_TRUE(has_text(error, ErrorCode::internal, "device cuda:1"));
  fake::heal();
  delete held_by_handler;
}

TEST(DeviceFailures, ADeviceThatFailsWhileARequestWaitsIsTheErrorOfTheCall) {
  Cluster cluster(2, worker0_maps);
  const at::Tensor tensor = cuda(0, 1);
  fake::Hold hold(device(0));
  fake::fill_later(tensor, 2);
  const auto result = rpc_async<same>("worker1", tensor);
  fake::break_device(0);
  const auto error = error_of([&] { static_cast<void>(result.get()); });
  EXPECT_TRUE(has_text(error, ErrorCode::internal, "failed: device cuda:0 has failed"));
  fake::heal();
}

TEST(DeviceFailures, ACallTimesOutWhileADeviceIsBusy) {
  Cluster cluster(2, worker0_maps);
  const at::Tensor tensor = cuda(0, 1);
  fake::Hold hold(device(0));
  fake::fill_later(tensor, 2);
  const auto error = error_of(
      [&] { static_cast<void>(rpc_sync<same>({.to = "worker1", .timeout = 50ms}, tensor)); });
  EXPECT_TRUE(has_text(error, ErrorCode::timeout, "timed out after 50 ms"));
  hold.release();
  EXPECT_TRUE(all_are(rpc_sync<same>("worker1", tensor), 2));
}

std::int64_t nanoseconds_left(const at::Tensor&) {
  const std::chrono::nanoseconds left =
      stitch::rpc::ExecutionContext::current().deadline - std::chrono::steady_clock::now();
  return left.count();
}

TEST(DeviceFailures, ADeadlineGoesOnWhileADeviceIsBusy) {
  Cluster cluster(2, worker0_maps);
  for (const int busy : {0, 1}) {  // the caller's, before the request is sent; the callee's
    const at::Tensor tensor = cuda(0, 1);
    fake::Hold hold(device(busy));
    if (busy == 0) fake::fill_later(tensor, 2);
    const auto left = rpc_async<nanoseconds_left>({.to = "worker1", .timeout = 20s}, tensor);
    ASSERT_TRUE(eventually([&] { return fake::has_queued_work(device(busy)); }));
    std::this_thread::sleep_for(200ms);  // what the call must not get back below
    EXPECT_FALSE(left.ready());
    hold.release();
    EXPECT_LE(std::chrono::nanoseconds(left.get()), 20s - 100ms) << "cuda:" << busy << " was busy";
  }
}

TEST(DeviceFailures, AWorkerLeavesWhileADeviceNeverEnds) {
  Cluster cluster(2, [](Options& options) {
    worker0_maps(options);
    options.shutdown_timeout = 300ms;
  });
  const at::Tensor tensor = cuda(0, 1);
  fake::Hold hold(device(0));
  fake::fill_later(tensor, 2);
  const auto result = rpc_async<same>("worker1", tensor);
  EXPECT_FALSE(cluster.shutdown().empty());  // says that it was not graceful
  EXPECT_TRUE(result.has_error());
}

TEST(DeviceFailures, AGracefulShutdownWaitsForWhatIsOnItsWay) {
  Future<at::Tensor> result;
  {
    Cluster cluster(2, worker0_maps);
    result = rpc_async<same>("worker1", cuda(0, 4, {50'000}));
    EXPECT_TRUE(cluster.shutdown().empty());
  }
  EXPECT_TRUE(all_are(result.get(), 4));
}

std::int64_t current_stream_of_an_inline_function() { return fake::current_stream(device(0)).id(); }
STITCH_INLINE(current_stream_of_an_inline_function);

TEST(DeviceStreamsOfHandlers, AThreadThatWaitsLendsNoStreamsToWhatItRunsMeanwhile) {
  Cluster cluster(2);
  static_cast<void>(rpc_sync<same>("worker1", cuda(0, 1)));  // the device is in use
  const c10::StreamGuard mine(fake::pool_stream(device(0)));
  // Its own worker runs the function, on the thread that waits for it if that can.
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(rpc_sync<current_stream_of_an_inline_function>("worker0"), 0);
    EXPECT_EQ(rpc_sync<current_stream_of_an_inline_function>("worker1"), 0);
  }
  EXPECT_NE(fake::current_stream(device(0)).id(), 0);
}

}  // namespace
}  // namespace placement_streams_test
