// Calls whose tensors go from device to device by transfers, over the double of CUDA and NCCL: each
// path, streams on both sides, what does not fit. Every access that nothing puts in order
// is a violation.

#include "stitch/rpc/gpu/device_bridge.h"
#include "tests/gpu/device_test.h"

namespace direct_test {  // its functions are registered under their full names
namespace {

using namespace stitch::testing::device_names;  // NOLINT

[[maybe_unused]] const bool installed = fake::install();

constexpr std::int64_t kLarge = 100'000;  // floats: a transfer, packed
constexpr std::int64_t kOwn = 300'000;    // floats: a transfer of its own

at::Tensor cuda(int index, float value, at::IntArrayRef sizes = {kLarge}) {
  return filled(index, value, sizes);
}
at::Tensor same(at::Tensor tensor) { return tensor; }
std::vector<at::Tensor> all_same(std::vector<at::Tensor> tensors) { return tensors; }
at::Tensor twice(const at::Tensor& tensor) { return tensor * 2; }

TEST(DirectTensors, WithinAProcessTensorsAreCopiedOnTheirDeviceOrFromDeviceToDevice) {
  Cluster cluster(2, [](Options& options) {
    if (options.rank == 0)
      options.device_maps["worker1"] = {{"cuda:0", "cuda:1"}, {"cuda:2", "cuda:2"}};
  });
  ASSERT_TRUE(eventually([&] {
    EXPECT_TRUE(holds(rpc_sync<twice>("worker1", cuda(2, 3)), 2, 6));
    return count(cluster[0], "gpu.sent_messages.local.worker1.cuda:2") > 0;
  }));
  // From device to device by staging until copies between the two are tested.
  ASSERT_TRUE(eventually([&] {
    EXPECT_TRUE(holds(rpc_sync<twice>("worker1", cuda(0, 3, {kOwn})), 0, 6));
    return count(cluster[0], "gpu.sent_messages.peer.worker1.cuda:0") > 0 &&
           count(cluster[1], "gpu.sent_messages.peer.worker0.cuda:1") > 0;
  }));
  ASSERT_TRUE(all_is_counted(cluster[0]));
  EXPECT_EQ(count(cluster[0], "gpu.sent_bytes.host.worker1.cuda:0"), 0);
  const auto messages = count(cluster[0], "gpu.sent_messages.peer.worker1.cuda:0");
  EXPECT_EQ(count(cluster[1], "gpu.received_messages.peer.worker0.cuda:1"), messages);
  EXPECT_EQ(count(cluster[1], "gpu.received_bytes.peer.worker0.cuda:1"), messages * kOwn * 4);
}

TEST(DirectTensors, BetweenProcessesTheyGoByStagingAndThenByNccl) {
  fake::workers_are_processes(true);
  Cluster cluster(2, worker0_maps);
  EXPECT_TRUE(holds(rpc_sync<twice>("worker1", cuda(0, 3, {kOwn})), 0, 6));
  ASSERT_TRUE(all_is_counted(cluster[0]));
  EXPECT_GE(count(cluster[0], "gpu.sent_messages.staging.worker1.cuda:0"), 1);
  ASSERT_TRUE(eventually([&] {
    EXPECT_TRUE(holds(rpc_sync<twice>("worker1", cuda(0, 3, {kOwn})), 0, 6));
    return count(cluster[0], "gpu.sent_messages.nccl.worker1.cuda:0") > 0 &&
           count(cluster[1], "gpu.sent_messages.nccl.worker0.cuda:1") > 0;
  }));
}

TEST(DirectTensors, WhatNothingElseRefersToIsHandedOver) {
  Cluster cluster(1);
  ASSERT_TRUE(eventually([&] {
    EXPECT_TRUE(holds(rpc_sync<same>("worker0", cuda(0, 1)), 0, 1));
    return count(cluster[0], "gpu.sent_messages.local.worker0.cuda:0") > 0;
  }));
  auto copies = fake::gpu().calls("memcpy_async");
  at::Tensor tensor = cuda(0, 5, {kOwn});
  const void* const memory = tensor.data_ptr();
  Future<at::Tensor> result = rpc_async<same>("worker0", tensor);
  EXPECT_NE(result.get().data_ptr(), memory);  // it is still the caller's
  EXPECT_GT(fake::gpu().calls("memcpy_async"), copies);
  result = Future<at::Tensor>();
  // There and back, unless a thread is still about to drop what it has of the memory.
  ASSERT_TRUE(eventually([&] {
    tensor = cuda(0, 5, {kOwn});
    const void* const before = tensor.data_ptr();
    const int gate = fake::gpu().make_gate();
    fake::fill_later(tensor, 7, gate);
    result = rpc_async<same>("worker0", tensor);
    tensor = at::Tensor();
    copies = fake::gpu().calls("memcpy_async");
    fake::gpu().open_gate(gate);
    const at::Tensor back = result.get();
    result = Future<at::Tensor>();
    EXPECT_TRUE(holds(back, 0, 7));
    return back.data_ptr() == before && fake::gpu().calls("memcpy_async") == copies;
  }));
}

at::Tensor one_more(at::Tensor tensor) {
  tensor.add_(1);
  return tensor;
}

TEST(DirectTensors, WhatTheCallersStreamStillReadsIsNotHandedOver) {
  Cluster cluster(1);
  ASSERT_TRUE(eventually([&] {
    EXPECT_TRUE(holds(rpc_sync<same>("worker0", cuda(0, 1)), 0, 1));
    return count(cluster[0], "gpu.sent_messages.local.worker0.cuda:0") > 0;
  }));
  const c10::Stream stream = fake::pool_stream(device(0));
  const c10::StreamGuard mine(stream);
  const int written = fake::gpu().make_gate();
  at::Tensor tensor = cuda(0, 5, {kOwn});
  const at::Tensor copy = at::empty_like(tensor);
  fake::fill_later(tensor, 7, written);
  const auto result = rpc_async<one_more>("worker0", tensor);
  fake::Hold reading(stream);
  at::Tensor(copy).copy_(tensor, true);
  tensor = at::Tensor();
  fake::gpu().open_gate(written);
  const at::Tensor more = result.get();
  reading.release();
  EXPECT_TRUE(holds(more, 0, 8));
  EXPECT_TRUE(holds(copy, 0, 7));
}

TEST(DirectTensors, ATensorOfAnotherStreamMayBeDroppedOnceTheCallIsMade) {
  Cluster cluster(2, worker0_maps);
  for (const std::int64_t size : {kLarge, kOwn}) {
    const c10::Stream stream = fake::pool_stream(device(0));
    at::Tensor tensor = cuda(0, 5, {size});
    std::optional<fake::Hold> busy;
    Future<at::Tensor> result;
    {
      const c10::StreamGuard mine(stream);
      busy.emplace(stream);
      result = rpc_async<twice>("worker1", tensor);
    }
    tensor = at::Tensor();
    // Memory of the default stream, as the tensor's was.
    std::vector<at::Tensor> others;
    for (int i = 0; i < 4; ++i) others.push_back(cuda(0, 9, {size}));
    busy.reset();
    EXPECT_TRUE(holds(result.get(), 0, 10)) << size;
  }
}

TEST(DirectTensors, MemoryThatLibtorchDidNotAllocateIsNotHandedOver) {
  Cluster cluster(1);
  ASSERT_TRUE(eventually([&] {
    EXPECT_TRUE(holds(rpc_sync<same>("worker0", cuda(0, 1)), 0, 1));
    return count(cluster[0], "gpu.sent_messages.local.worker0.cuda:0") > 0;
  }));
  const at::Tensor owner = cuda(0, 5, {kOwn});
  ASSERT_TRUE(all_is_counted(cluster[0]));
  const auto sent = count(cluster[0], "gpu.sent_messages.local.worker0.cuda:0");
  at::Tensor view = at::for_blob(owner.data_ptr(), {kOwn})
                        .options(owner.options())
                        .target_device(device(0))
                        .make_tensor();
  auto result = rpc_async<one_more>("worker0", view);
  view = at::Tensor();
  EXPECT_TRUE(holds(result.get(), 0, 6));
  EXPECT_TRUE(holds(owner, 0, 5)) << "changed by the handler";
  ASSERT_TRUE(all_is_counted(cluster[0]));
  EXPECT_GT(count(cluster[0], "gpu.sent_messages.local.worker0.cuda:0"), sent);
}

TEST(DirectTensors, SmallTensorsOfAMessageArePackedIntoOneTransfer) {
  Cluster cluster(2, worker0_maps);
  const at::Tensor matrix = at::arange(300 * 400, at::kFloat).reshape({300, 400}).to(device(0));
  std::vector<at::Tensor> tensors{matrix.t().slice(0, 0, 400, 3),
                                  matrix.select(0, 7).to(at::kHalf)};
  for (int i = 0; i < 40; ++i) tensors.push_back(cuda(0, static_cast<float>(i), {i + 1, 900}));
  std::vector<at::Tensor> results = rpc_sync<all_same>("worker1", tensors);
  ASSERT_EQ(results.size(), tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i)
    EXPECT_TRUE(at::equal(results[i].cpu(), tensors[i].cpu())) << i;
  EXPECT_EQ(results.front().storage().data_ptr().get(), results.back().storage().data_ptr().get());
  ASSERT_TRUE(all_is_counted(cluster[0]));
  EXPECT_EQ(count(cluster[0], "gpu.sent_messages.staging.worker1.cuda:0"), 1);
}

// By transfer, packed into one, and in the message itself.
TEST(DirectTensors, ACallDuringACaptureIsRefusedBeforeAnythingIsPartOfTheGraph) {
  const Cluster cluster(2);
  const c10::Stream stream = fake::pool_stream(device(0));
  const auto raw = static_cast<cuda_api::Stream>(stitch::rpc::device_bridge()->raw(stream));
  const auto queued = [] {
    return fake::gpu().calls("memcpy_async") + fake::gpu().calls("event_record") +
           fake::gpu().calls("malloc");
  };
  for (const std::int64_t size : {kOwn, kLarge, std::int64_t{10}}) {
    // The other device is not captured, and comes first.
    const std::vector<at::Tensor> tensors{cuda(1, 1, {size}), cuda(0, 2, {size})};
    ASSERT_EQ(fake::gpu().wait_until_idle(), "");
    const auto before = queued();
    const c10::StreamGuard on(stream);
    fake::gpu().set_capturing(0, raw, true);
    const auto error = error_of([&] { rpc_sync<all_same>("worker1", tensors); });
    fake::gpu().set_capturing(0, raw, false);
    EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument, "device cuda:0 is being captured"));
    EXPECT_EQ(queued(), before) << size;
  }
}

TEST(DirectTensors, AResultIsReceivedIntoATensorOnADevice) {
  Cluster cluster(2, worker0_maps);
  for (const std::int64_t size : {std::int64_t{10}, kLarge, kOwn}) {
    const c10::StreamGuard mine(fake::pool_stream(device(0)));
    const at::Tensor into = cuda(0, 1, {size});
    const at::Tensor argument = cuda(0, 4, {size});
    const int gate = fake::gpu().make_gate();
    fake::fill_later(into, 5, gate);  // before the result
    const auto version = into._version();
    const auto result = rpc_async<twice>({.to = "worker1", .into = into}, argument);
    EXPECT_FALSE(result.wait_for(20ms));
    fake::gpu().open_gate(gate);
    EXPECT_TRUE(result.get().is_same(into));
    EXPECT_TRUE(holds(into, 0, 8));
    EXPECT_GT(into._version(), version);
  }
  const auto error = error_of([] {
    const at::Tensor into = cuda(1, 1);
    static_cast<void>(rpc_sync<twice>({.to = "worker1", .into = into}, cuda(0, 4)));
  });
  EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument, "the tensor to receive it into is"));
}

TEST(DirectTensors, ShapesStridesTypesAndFlagsAreKept) {
  for (const bool apart : {false, true}) {
    fake::workers_are_processes(apart);
    Cluster cluster(2, worker0_maps);
    const at::Tensor matrix = at::arange(400 * 600, at::kFloat).reshape({400, 600}).to(device(0));
    const at::Tensor huge = at::rand({700, 800}).to(device(0));
    const std::vector<at::Tensor> tensors{
        matrix,
        matrix.t(),
        matrix.slice(1, 0, 600, 2),
        matrix.narrow(0, 1, 1).expand({3, 600}),
        matrix.to(at::kLong),
        matrix.to(at::kHalf).select(0, 2),
        matrix.gt(5),
        huge.t(),
        huge.t().slice(0, 3, 790, 3),
        huge.narrow(1, 3, 1).expand({700, 9}),
        at::Tensor(),
        cuda(0, 0, {0, 3}),
        at::ones({40'000}),
        on("cuda:0", at::ones({70'000})).tensor(),
        at::scalar_tensor(4.0, at::TensorOptions().device(device(0))),
        cuda(0, 1, {5}).requires_grad_()};
    const auto results = rpc_sync<all_same>("worker1", tensors);
    ASSERT_EQ(results.size(), tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (!tensors[i].defined()) {
        EXPECT_FALSE(results[i].defined());
        continue;
      }
      EXPECT_EQ(results[i].device(), tensors[i].device()) << i;
      EXPECT_EQ(results[i].scalar_type(), tensors[i].scalar_type()) << i;
      EXPECT_EQ(results[i].requires_grad(), tensors[i].requires_grad()) << i;
      EXPECT_EQ(results[i].sizes(), tensors[i].sizes()) << i;
      EXPECT_TRUE(at::equal(results[i].detach().cpu(), tensors[i].detach().cpu())) << i;
    }
    EXPECT_EQ(results[1].strides(), tensors[1].strides());
    EXPECT_EQ(results[8].strides(), at::IntArrayRef({1, 263}));  // without gaps, in their order
    ASSERT_TRUE(all_is_counted(cluster[0]));
    EXPECT_GT(count(cluster[0], apart ? "gpu.sent_messages.staging.worker1.cuda:0"
                                      : "gpu.sent_messages.peer.worker1.cuda:0") +
                  count(cluster[0], "gpu.sent_messages.staging.worker1.cuda:0"),
              0);
  }
}

at::Tensor filled_later(const at::Tensor& tensor, int gate) {
  const at::Tensor result = at::empty_like(tensor);
  fake::fill_later(result, 9, gate);
  return result;
}

TEST(DirectTensors, AResultCarriesWhatTheHandlersStreamHasStillToCompute) {
  Cluster cluster(2, worker0_maps);
  const int gate = fake::gpu().make_gate();
  const auto result = rpc_async<filled_later>("worker1", cuda(0, 1, {kOwn}), gate);
  EXPECT_FALSE(result.wait_for(20ms));
  fake::gpu().open_gate(gate);
  EXPECT_TRUE(holds(result.get(), 0, 9));
}

void by_staging(Options& options) {
  worker0_maps(options);
  options.gpu_paths = {"staging"};
}

TEST(DirectTensors, WithoutMemoryTheCallFailsNamingDevicePathAndPeer) {
  Cluster cluster(2, by_staging);  // testing another path takes memory, too
  const at::Tensor tensor = cuda(0, 1, {kOwn});
  fake::fail_allocations(1);
  const auto error = error_of([&] { static_cast<void>(rpc_sync<same>("worker1", tensor)); });
  fake::fail_allocations(0);
  EXPECT_TRUE(has_text(error, ErrorCode::overloaded,
                       "1200000 bytes of its tensors did not arrive on device cuda:1 of worker "
                       "\"worker1\" (id 1) from worker \"worker0\" (id 0): by staging: "))
      << error.what();
  EXPECT_TRUE(has_text(error, ErrorCode::overloaded, "out of memory"));
  EXPECT_TRUE(holds(rpc_sync<twice>("worker1", tensor), 0, 2));
}

at::Tensor forgets_memory(const at::Tensor& tensor) {
  fake::fail_allocations(0);
  at::Tensor result = tensor * 3;
  fake::fail_allocations(1);
  return result;
}

TEST(DirectTensors, WithoutMemoryForItsResultTheCallFailsToo) {
  Cluster cluster(2, by_staging);  // testing another path takes memory, too
  const at::Tensor tensor = cuda(0, 1, {kOwn});
  const auto error =
      error_of([&] { static_cast<void>(rpc_sync<forgets_memory>("worker1", tensor)); });
  fake::fail_allocations(0);
  EXPECT_TRUE(has_text(error, ErrorCode::overloaded, "failed: "));
  EXPECT_TRUE(has_text(error, ErrorCode::overloaded, "on device cuda:0 of worker \"worker0\""));
  EXPECT_FALSE(has_text(error, ErrorCode::overloaded, "does not match its type")) << error.what();
}

TEST(DirectTensors, ACallThatTimesOutLeavesNothingBehind) {
  Cluster cluster(2, worker0_maps);
  const int gate = fake::gpu().make_gate();
  const at::Tensor tensor = cuda(0, 1, {kOwn});
  fake::fill_later(tensor, 7, gate);
  const auto error = error_of(
      [&] { static_cast<void>(rpc_sync<same>({.to = "worker1", .timeout = 50ms}, tensor)); });
  EXPECT_EQ(error.code(), ErrorCode::timeout);
  fake::gpu().open_gate(gate);
  EXPECT_TRUE(eventually([&] { return count(cluster[0], "gpu.transfers_sending") == 0; }));
  EXPECT_TRUE(eventually([&] { return count(cluster[1], "gpu.transfers_receiving") == 0; }));
  EXPECT_TRUE(holds(rpc_sync<same>("worker1", tensor), 0, 7));
}

}  // namespace
}  // namespace direct_test
