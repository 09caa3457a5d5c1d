// What programs queue on streams of their own, and calls that bring no tensor to tell: objects that
// are read elsewhere, threads that have no device, devices that are lost. Over the double of CUDA.

#include "stitch/dist_autograd/graph/device_order.h"
#include "stitch/rpc/default_streams.h"
#include "tests/gpu/device_test.h"

namespace own_streams_test {  // its functions are registered under their full names
namespace {

using namespace stitch::testing::device_names;  // NOLINT
using stitch::rpc::StreamSet;

class OwnStreams : public ::testing::TestWithParam<std::int64_t> {};
INSTANTIATE_TEST_SUITE_P(FewAndManyBytes, OwnStreams, ::testing::Values(8, 100'000));

TEST(DefaultStreams, WaitForWhatTheCurrentOneHas) {
  const at::Tensor written = filled(1, 1, {8});
  at::Tensor read = filled(1, 2, {8});
  const c10::Stream own = fake::pool_stream(device(1));
  {
    const fake::Hold hold(own);
    {
      const c10::StreamGuard guard(own);
      fake::fill_later(written, 5);
      stitch::rpc::default_streams_wait_for_current();
    }
    read.copy_(written, /*non_blocking=*/true);
    EXPECT_TRUE(fake::has_queued_work(device(1)));
  }
  EXPECT_TRUE(all_are(read, 5));
}

TEST(DefaultStreams, AreWaitedForByTheCurrentOne) {
  const at::Tensor written = filled(1, 1, {8});
  at::Tensor read = filled(1, 2, {8});
  const c10::StreamGuard guard(fake::pool_stream(device(1)));
  {
    const fake::Hold hold(fake::default_stream(device(1)));
    {
      const c10::StreamGuard standard(fake::default_stream(device(1)));
      fake::fill_later(written, 5);
    }
    stitch::rpc::current_streams_wait_for_default();
    read.copy_(written, /*non_blocking=*/true);
    EXPECT_TRUE(fake::has_queued_work(device(1)));
  }
  EXPECT_TRUE(all_are(read, 5));
}

TEST(DefaultStreams, AndNothingElseNeedNotBeWaitedFor) {
  const auto recorded = fake::gpu().calls("event_record");
  EXPECT_EQ(fake::gpu().wait_until_idle(), "");
  stitch::rpc::default_streams_wait_for_current();
  stitch::rpc::current_streams_wait_for_default();
  EXPECT_EQ(fake::gpu().calls("event_record"), recorded);
}

// A tensor that a stream of its own has yet to fill with 7.
struct Late {
  c10::Stream stream = fake::pool_stream(device(1));
  std::optional<fake::Hold> hold;
  at::Tensor tensor;
  explicit Late(std::int64_t size) {
    const c10::StreamGuard own(stream);
    tensor = filled(1, 1, {size});
    hold.emplace(stream);
    fake::fill_later(tensor, 7);
  }
};

bool fetches_sevens(const RRef<at::Tensor>& reference) { return all_are(reference.to_here(), 7); }

struct Filled {
  at::Tensor value;
  [[nodiscard]] bool has_sevens() const { return all_are(value, 7); }
};
bool calls_it(const RRef<Filled>& reference) { return reference.rpc_sync<&Filled::has_sevens>(); }

TEST_P(OwnStreams, AMethodOfAnObjectRunsOnceItIsWritten) {
  Cluster cluster(2);
  Late late(GetParam());
  const auto reference = [&] {
    const c10::StreamGuard own(late.stream);
    return stitch::make_rref(Filled{late.tensor});
  }();
  const auto right = rpc_async<calls_it>("worker1", reference);
  EXPECT_FALSE(right.wait_for(50ms)) << "it was read before it was written";
  late.hold->release();
  EXPECT_TRUE(right.get());
}

// On the stream of the handler, whose answer would wait for it.
bool passes_on_what_it_has_yet_to_write(const at::Tensor& by) {
  const at::Tensor made = filled(by.get_device(), 1, {by.numel()});
  fake::Hold hold(fake::current_stream(by.device()));
  fake::fill_later(made, 7);
  const auto right = rpc_async<fetches_sevens>("worker2", stitch::make_rref(made));
  const bool early = right.wait_for(50ms);
  hold.release();
  return right.get() && !early;
}

TEST_P(OwnStreams, AnObjectOfAHandlerIsFetchedOnceItIsWritten) {
  Cluster cluster(3);
  EXPECT_TRUE(rpc_sync<passes_on_what_it_has_yet_to_write>("worker1", filled(1, 1, {GetParam()})));
}

TEST(OwnStreamsOfObjects, TheirMemoryIsKeptForTheDefaultStream) {
  Cluster cluster(1);
  const c10::StreamGuard own(fake::pool_stream(device(1)));
  const at::Tensor tensor = filled(1, 1, {8});
  const auto one = stitch::make_rref(tensor);
  const at::Tensor of_vector = filled(1, 1, {8});
  const auto vector = stitch::make_rref(std::vector{of_vector, at::Tensor(), at::ones(2)});
  for (const at::Tensor& each : {tensor, of_vector}) {
    const auto recorded = fake::recorded_streams(each);
    EXPECT_GT(std::count(recorded.begin(), recorded.end(), fake::default_stream(device(1))), 0);
  }
}

// Each on a thread that has been on no device: its current one is the first.
TEST(ThreadsWithoutADevice, CreateContextsOnDevicesThatTheyUseAndNoOthers) {
  const c10::Stream busy = fake::pool_stream(device(1));
  const c10::Stream other = fake::pool_stream(device(1));
  fake::Hold hold(device(1));
  for (const c10::Stream& stream : {busy, fake::default_stream(device(1))}) {
    const c10::StreamGuard on(stream);
    fake::fill_later(at::empty({8}, at::TensorOptions(at::kFloat).device(device(1))), 1);
  }
  const auto contexts_of = [](const auto& use) {
    static_cast<void>(fake::gpu().take_contexts(0));
    std::thread(use).join();
    return fake::gpu().take_contexts(0);
  };
  const std::vector<int> own{1};
  const StreamSet streams({other});
  std::optional<stitch::rpc::DeviceGate> gate(std::in_place);
  EXPECT_EQ(contexts_of([&] { gate->add(busy); }), own);
  EXPECT_EQ(contexts_of([&] { static_cast<void>(gate->open()); }), own);
  EXPECT_EQ(contexts_of([&] { gate.reset(); }), own);
  EXPECT_EQ(contexts_of([&] { streams.wait_for_default(); }), own);
  EXPECT_EQ(contexts_of([&] {
              const c10::StreamGuard on(busy);
              streams.wait_for_current();
              stitch::rpc::default_streams_wait_for_current();
              stitch::rpc::current_streams_wait_for_default();
            }),
            own);
  namespace autograd = stitch::dist_autograd;
  EXPECT_EQ(contexts_of([&] { autograd::order_streams(busy, other); }), own);
  std::optional<autograd::ReadyPoint> ready(busy);
  EXPECT_EQ(contexts_of([&] { ready->record(); }), own);
  EXPECT_EQ(contexts_of([&] { ready->wait_on(other); }), own);
  EXPECT_EQ(contexts_of([&] { ready.reset(); }), own);
  hold.release();  // while what they use is there
}

at::Tensor same(at::Tensor tensor) { return tensor; }

class LostDevices : public ::testing::Test {
 protected:
  void TearDown() override { fake::heal(); }
  // So both are in use.
  static void use_1_and_2() {
    for (const int index : {1, 2})
      EXPECT_TRUE(all_are(rpc_sync<same>("worker1", filled(index, 3, {8})), 3));
  }
};

TEST_F(LostDevices, FailNoCallsWhoseTensorsAreOnOthers) {
  Cluster cluster(2);
  use_1_and_2();
  const at::Tensor on_the_lost = filled(2, 3, {8});
  const at::Tensor tensor = filled(1, 3, {8});
  fake::break_device(2);
  EXPECT_TRUE(all_are(rpc_sync<same>("worker1", tensor), 3));
  const auto error = error_of([&] { static_cast<void>(rpc_sync<same>("worker1", on_the_lost)); });
  EXPECT_TRUE(has_text(error, ErrorCode::internal, "cuda:2"));
}

TEST_F(LostDevices, AreLeftOutOfStreamsUnlessTheyAreNeeded) {
  Cluster cluster(2);
  use_1_and_2();
  fake::break_device(2);
  const auto streams = StreamSet::from_pool(stitch::rpc::device_bit(device(1)));
  ASSERT_NE(streams, nullptr);
  for (const c10::Stream& stream : streams->streams()) EXPECT_NE(stream.device(), device(2));
  const auto error =
      error_of([] { static_cast<void>(StreamSet::from_pool(stitch::rpc::device_bit(device(2)))); });
  EXPECT_TRUE(has_text(error, ErrorCode::internal, "device cuda:2 has failed: "));
  const StreamSet lost({fake::pool_stream(device(2))});
  const auto named = error_of([&] { lost.wait_for_default(); });
  EXPECT_TRUE(has_text(named, ErrorCode::internal, "device cuda:2 has failed: "));
}

std::optional<fake::Hold> held_by_handler;
// Its tensor is on cuda:1; the call that fills it has a stream of cuda:2, too.
struct FilledLater {
  at::Tensor tensor = filled(1, 1, {8});
  void fill(const at::Tensor& by) {
    held_by_handler.emplace(fake::current_stream(by.device()));
    fake::fill_later(tensor, 7);
    fake::break_device(2);
  }
  [[nodiscard]] bool is_filled() const { return all_are(tensor, 7); }
};
int one() { return 1; }

TEST_F(LostDevices, EndNoTurnBeforeWhatItHasQueuedOnOthers) {
  Cluster cluster(2);
  use_1_and_2();
  const auto object = stitch::remote<stitch::Serialized<FilledLater>>("worker1");
  const auto fill = object.rpc_async<&FilledLater::fill>(filled(1, 3, {8}));
  ASSERT_TRUE(eventually([] { return fake::has_queued_work(device(1)); }));
  const auto read = object.rpc_async<&FilledLater::is_filled>();
  EXPECT_EQ(rpc_sync<one>("worker1"), 1);
  EXPECT_FALSE(read.wait_for(20ms)) << "the turn before it has not ended";
  held_by_handler.reset();
  EXPECT_TRUE(has_text(error_of([&] { fill.get(); }), ErrorCode::internal, "cuda:2"));
  EXPECT_TRUE(read.get());
}

TEST_F(LostDevices, KeepNoProgramThatIsUnderTheirStreamsFromItsOtherWork) {
  Cluster cluster(1);
  const c10::StreamGuard own(fake::pool_stream(device(2)));
  fake::break_device(2);
  EXPECT_NO_THROW(static_cast<void>(stitch::make_rref(at::ones(2))));
  EXPECT_NO_THROW(stitch::rpc::current_streams_wait_for_default());
}

}  // namespace
}  // namespace own_streams_test
