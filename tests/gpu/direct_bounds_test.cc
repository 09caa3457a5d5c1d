// What messages with transfers count at both ends, what becomes of those that have no place, and
// what their devices are asked for. Nothing of them is left, shutdown waits for nothing, and no
// capture ends. Over the double of CUDA and NCCL.

#include <future>

#include "stitch/base/byte_io.h"
#include "stitch/base/callback_scope.h"
#include "stitch/rpc/gpu/device_bridge.h"
#include "stitch/rpc/message/message.h"
#include "tests/gpu/device_test.h"
#include "tests/support/no_more_threads.h"

namespace direct_bounds_test {  // its functions are registered under their full names
namespace {

using namespace stitch::testing::device_names;  // NOLINT
using stitch::WorkerInfo;
using stitch::rpc::PeerBudget;
using stitch::rpc::PeerFlow;
namespace wire = stitch::rpc::wire;

constexpr std::int64_t kOwn = 300'000;  // floats: a transfer of its own
constexpr std::size_t kMegabyte = std::size_t{1} << 20;

at::Tensor cuda(int index, float value, std::int64_t size = kOwn) {
  return filled(index, value, {size});
}
at::Tensor same(at::Tensor tensor) { return tensor; }
at::Tensor twice(const at::Tensor& tensor) { return tensor * 2; }
std::atomic<int> taken{0};
void take(const at::Tensor& tensor) {
  EXPECT_TRUE(tensor.is_cuda());
  ++taken;
}

// ---- messages with a section of transfers that nothing belongs to

constexpr std::uint16_t kOwnFrame = 0x1f0;
std::atomic<std::uint64_t> next_id{1'000'000};
std::atomic<bool> naming{false};
std::atomic<int> without_tensors{0};  // frames that came like that

class NamesTransfers final : public stitch::rpc::Extension {
 public:
  explicit NamesTransfers(stitch::rpc::Agent& agent) : first_(agent.self().id.value() == 0) {
    agent.set_frame_handler(kOwnFrame, [](const stitch::rpc::InMessage& message) {
      if (message.arrival && message.arrival->error &&
          message.arrival->error->code() == ErrorCode::overloaded)
        ++without_tensors;
    });
  }
  void on_send(stitch::rpc::OutMessage& message, const WorkerInfo&) override {
    if (!naming || !first_) return;
    const std::vector<std::byte> no_devices(4);  // a count of 0
    TransferSection section;
    section.transfers = {{next_id++, 100 * kMegabyte, at::Device(at::kCUDA, 1)}};
    section.tensors = {{0, at::kFloat, false, {2}, {1}, 0, 0}};
    message.frame.add_section(wire::kDevices, no_devices);
    message.frame.add_section(wire::kTransfers, section.encode().span());
  }

 private:
  const bool first_;
};
[[maybe_unused]] const int extension = stitch::rpc::register_extension(
    [](stitch::rpc::Agent& agent) -> std::unique_ptr<stitch::rpc::Extension> {
      return std::make_unique<NamesTransfers>(agent);
    });

// Worker 0 sends it to worker 1, with an undefined tensor in its table.
void send_named(Cluster& cluster, std::uint16_t kind) {
  stitch::rpc::OutMessage message(kind);
  stitch::base::ByteWriter(message.frame.body()).write(std::uint64_t{424'242});
  message.tensors.emplace_back();
  naming = true;
  cluster[0].agent()->sender().send(cluster[1].info(), std::move(message),
                                    stitch::rpc::Sender::Traffic::reply, nullptr);
  naming = false;
}

class DirectBounds : public ::testing::Test {
 protected:
  void SetUp() override {
    taken = 0;
    without_tensors = 0;
  }
  static void expect_nothing_left(Cluster& cluster) {
    for (int i = 0; i < cluster.size(); ++i) {
      EXPECT_TRUE(eventually([&] { return count(cluster[i], "gpu.transfers_sending") == 0; })) << i;
      EXPECT_TRUE(eventually([&] { return count(cluster[i], "gpu.transfers_receiving") == 0; }))
          << i;
    }
  }
  // Calls, as of a handler, of a tensor that is made later: those that exceed four budgets are
  // refused before.
  static void expect_refused(Cluster& cluster, int made, int refused, const char* limit) {
    const int gate = fake::gpu().make_gate();
    const at::Tensor tensor = cuda(0, 1);
    fake::fill_later(tensor, 7, gate);
    std::vector<Future<at::Tensor>> calls;
    std::optional<stitch::base::CallbackScope> handler;
    handler.emplace();
    for (int i = 0; i < made; ++i) calls.push_back(rpc_async<same>("worker1", tensor));
    handler.reset();
    int failed = 0;
    EXPECT_TRUE(eventually([&] {
      failed = 0;
      for (const auto& call : calls) failed += call.ready() ? 1 : 0;
      return failed >= refused;
    }));
    // No event tells that no more calls fail.
    std::this_thread::sleep_for(20ms);
    fake::gpu().open_gate(gate);
    failed = 0;
    for (const auto& call : calls) {
      ASSERT_TRUE(eventually([&] { return call.ready(); }));
      if (call.has_error()) {
        ++failed;
        EXPECT_TRUE(has_text(error_of([&] { static_cast<void>(call.get()); }),
                             ErrorCode::overloaded, limit));
      } else {
        EXPECT_TRUE(all_are(call.get(), 7));
      }
    }
    EXPECT_EQ(failed, refused);
    expect_nothing_left(cluster);
  }
};

TEST_F(DirectBounds, RequestsThatAreRefusedForTheirNumberLeaveNothingBehind) {
  for (const bool apart : {false, true}) {
    fake::workers_are_processes(apart);
    Cluster cluster(2, [](Options& options) {
      worker0_maps(options);
      if (options.rank == 1) options.max_inflight_calls = 1;
    });
    expect_refused(cluster, 6, 2, "max_inflight_calls 1");
    EXPECT_TRUE(all_are(rpc_sync<twice>("worker1", cuda(0, 4)), 8));
  }
}

TEST_F(DirectBounds, RequestsCountWhatComesBesideThem) {
  Cluster cluster(2, [](Options& options) {
    worker0_maps(options);
    if (options.rank == 1) options.max_inflight_bytes = 2 * kMegabyte;
  });
  expect_refused(cluster, 10, 2, "max_inflight_bytes 2097152");
  EXPECT_TRUE(all_are(rpc_sync<twice>("worker1", cuda(0, 4)), 8));
}

TEST_F(DirectBounds, OneWayRequestsGiveBackWhatCameBesideThem) {
  constexpr int kCalls = 30;
  Cluster cluster(2, [](Options& options) {
    worker0_maps(options);
    options.max_inflight_bytes = 8 * kMegabyte;
  });
  for (int i = 0; i < kCalls; ++i)
    stitch::notify<take>({.to = "worker1", .timeout = 10s}, cuda(0, 4));
  EXPECT_TRUE(eventually([&] { return taken == kCalls; }));
  expect_nothing_left(cluster);
}

// Until it is stored its transfer has not ended: its sender, which waits for that, does not leave.
TEST_F(DirectBounds, AResultCountsUntilItHasBeenDealtWith) {
  Cluster cluster(2, worker0_maps);
  const std::string key = "rpc.peer.worker0.replies_unwritten_bytes";
  const c10::StreamGuard mine(fake::pool_stream(at::Device(at::kCUDA, 0)));
  const at::Tensor into = cuda(0, 1);
  const at::Tensor argument = cuda(2, 4);  // whose stream is free
  const int gate = fake::gpu().make_gate();
  fake::fill_later(into, 5, gate);  // before the result
  const auto result = rpc_async<twice>({.to = "worker1", .into = into}, on("cuda:1", argument));
  EXPECT_TRUE(eventually([&] { return count(cluster[0], "gpu.waiting") > 0; }));
  // No event tells that the result does not complete.
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(result.ready());
  EXPECT_GE(count(cluster[1], key), 4 * kOwn);
  EXPECT_GT(count(cluster[1], "gpu.transfers_sending"), 0);
  fake::gpu().open_gate(gate);
  EXPECT_TRUE(all_are(result.get(), 8));
  EXPECT_TRUE(eventually([&] { return count(cluster[1], key) == 0; }));
}

TEST_F(DirectBounds, FramesThatNameTransfersAreHeldUpToTheLimit) {
  Cluster cluster(2, [](Options& options) {
    worker0_maps(options);
    if (options.rank == 1) options.max_inflight_bytes = 4 * kMegabyte;
  });
  for (int i = 0; i < 5; ++i) send_named(cluster, kOwnFrame);
  EXPECT_TRUE(eventually([&] { return without_tensors == 3; })) << without_tensors.load();
  EXPECT_EQ(cluster[1].agent()->device_tensors().waiting(), 4u);  // two messages, two transfers
  cluster[0].shutdown({.graceful = false});
  expect_nothing_left(cluster);
  static_cast<void>(cluster.shutdown());
}

TEST_F(DirectBounds, AResultThatNoCallWaitsForIsNotWaitedFor) {
  Cluster cluster(2, worker0_maps);
  const auto received = count(cluster[1], "rpc.messages_received");
  for (int i = 0; i < 5; ++i) send_named(cluster, wire::kReply);
  EXPECT_TRUE(
      eventually([&] { return count(cluster[1], "rpc.messages_received") == received + 5; }));
  EXPECT_EQ(cluster[1].agent()->device_tensors().waiting(), 0u);
}

TEST_F(DirectBounds, WithoutAThreadThatWaitsForDevicesTheCallFails) {
  Cluster cluster(3, worker0_maps);
  // The lanes of both devices have their threads, and worker 0 that which waits.
  for (const int index : {0, 1}) {
    EXPECT_TRUE(all_are(rpc_sync<twice>("worker2", cuda(index, 3)), 6));
    EXPECT_TRUE(all_are(cluster[2].rpc_sync<twice>("worker0", cuda(index, 3)), 6));
  }
  const at::Tensor tensor = cuda(0, 4);
  {
    const stitch::testing::NoMoreThreads none;
    const auto error = error_of([&] { static_cast<void>(rpc_sync<twice>("worker1", tensor)); });
    EXPECT_TRUE(has_text(error, ErrorCode::overloaded, "a thread that waits for devices"));
  }
  expect_nothing_left(cluster);
  EXPECT_TRUE(all_are(rpc_sync<twice>("worker1", tensor), 8));
}

TEST(TransferCounts, OfLargeTensorsAreHalfOfTheLimitAtMost) {
  PeerFlow flow({8 * kMegabyte, 100});
  EXPECT_EQ(flow.counted(100, 1000), 1100u);
  EXPECT_EQ(flow.counted(100, 100 * kMegabyte), 4 * kMegabyte - PeerFlow::kCallBytes);
  EXPECT_EQ(flow.counted(100, ~std::size_t{0}), 4 * kMegabyte - PeerFlow::kCallBytes);
  EXPECT_EQ(flow.counted(5 * kMegabyte, 100), 5 * kMegabyte);
  EXPECT_EQ(flow.counted_data(100, 100 * kMegabyte), 4 * kMegabyte);
  EXPECT_EQ(flow.counted_data(8 * kMegabyte, 1), 8 * kMegabyte);
  // Two at once.
  const std::size_t bytes = flow.counted(100, 100 * kMegabyte);
  EXPECT_TRUE(flow.budget.try_take(bytes, PeerBudget::Caller::program));
  EXPECT_TRUE(flow.budget.try_take(bytes, PeerBudget::Caller::program));
  PeerFlow tiny({100, 100});
  EXPECT_EQ(tiny.counted(50, 1000), 50u);
}

TEST(TransferCounts, OfASectionAreAtMost65536) {
  TransferSection section;
  for (std::uint32_t i = 0; i <= TransferSection::kMaxTransfers; ++i) {
    section.transfers.push_back({i + 1, std::uint64_t{1} << 62, at::Device(at::kCUDA, 1)});
    section.tensors.push_back({i, at::kFloat, false, {2}, {1}, i, 0});
  }
  EXPECT_EQ(section.bytes(), ~std::size_t{0});
  const auto error =
      error_of([&] { static_cast<void>(TransferSection::decode(section.encode().span())); });
  EXPECT_TRUE(has_text(error, ErrorCode::protocol, "names 65537 transfers"));
  section.transfers.pop_back();
  section.tensors.pop_back();
  EXPECT_EQ(TransferSection::decode(section.encode().span()).transfers.size(), 65536u);
}

TEST(GateWatches, WhatTheyHandOverCountsUntilItHasBeenTaken) {
  stitch::rpc::GateWatch watch("gates");
  std::promise<std::size_t> inside;
  watch.then(nullptr, [&](const std::optional<Error>&) { inside.set_value(watch.waiting()); });
  EXPECT_EQ(inside.get_future().get(), 1u);
  EXPECT_TRUE(eventually([&] { return watch.waiting() == 0; }));
}

// Captures a stream of cuda:1 into a graph while it lives, as a program does on another thread and
// in CUDA's default mode.
class Capture {
 public:
  Capture() { fake::gpu().set_capturing(0, stream_, true); }
  ~Capture() {
    EXPECT_EQ(fake::take_violations(), "");
    fake::gpu().set_capturing(0, stream_, false);
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

 private:
  const stitch::transport::gpu::cuda::Stream stream_ =
      static_cast<stitch::transport::gpu::cuda::Stream>(
          stitch::rpc::device_bridge()->raw(fake::pool_stream({c10::kCUDA, 1})));
};

TEST_F(DirectBounds, AskingADeviceEndsNoCapture) {
  const c10::Stream busy = fake::pool_stream({c10::kCUDA, 0});
  stitch::rpc::DeviceGate waits;
  {
    const fake::Hold hold(busy);
    const Capture capture;
    waits.add(busy);
    EXPECT_FALSE(waits.open());
  }
  EXPECT_TRUE(eventually([&] { return waits.open(); }));
}

TEST_F(DirectBounds, StreamsOfHandlersEndNoCapture) {
  const c10::Device here(c10::kCUDA, 0);
  stitch::rpc::note_device_in_use(here);
  const fake::Hold hold(fake::default_stream(here));
  const Capture capture;
  const auto streams = stitch::rpc::StreamSet::from_pool();
  ASSERT_TRUE(streams);
  streams->wait_for_default();
}

TEST_F(DirectBounds, ServingACallEndsNoCapture) {
  const c10::Device here(c10::kCUDA, 0);
  const Cluster cluster(2);
  const at::Tensor tensor = cuda(0, 1, 8);
  rpc_sync<take>("worker1", tensor);  // what is made once is there
  const c10::StreamGuard own(fake::pool_stream(here));
  const int before = taken;
  Future<void> done;
  {
    // What the handler's stream waits for.
    const fake::Hold hold(fake::default_stream(here));
    const Capture capture;
    done = rpc_async<take>("worker1", tensor);
    EXPECT_TRUE(eventually([&] { return taken == before + 1; }));
  }
  done.get();
}

TEST(GateWatches, WithoutAThreadWhatWaitsIsToldSo) {
  stitch::rpc::GateWatch watch("gates");
  std::optional<Error> error;
  {
    const stitch::testing::NoMoreThreads none;
    EXPECT_EQ(error_of([&] { watch.start(); }).code(), ErrorCode::overloaded);
    watch.then(nullptr, [&](const std::optional<Error>& why) { error = why; });
  }
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::overloaded);
  EXPECT_EQ(watch.waiting(), 0u);
}

TEST(DevicesOfLives, AnEarlierLifeDoesNotReplaceALaterOne) {
  using stitch::WorkerId;
  const WorkerInfo self{"me", WorkerId(0), 1};
  const auto life = [](std::uint64_t epoch, int devices) {
    stitch::rpc::DeviceTensors::Worker worker{{"it", WorkerId(1), epoch}, {}};
    worker.devices.count = devices;
    if (devices > 0)
      worker.devices.maps.emplace("me", std::map<std::string, std::string>{{"cuda:0", "cpu"}});
    return worker;
  };
  stitch::rpc::DeviceTensors tensors("me");
  stitch::rpc::DeviceTensors::Worker own{self, {}};
  own.devices.count = 1;
  tensors.start({own}, self.id, {});
  const stitch::rpc::OutMessage message(wire::kRequest);
  tensors.add(life(2, 1));
  EXPECT_TRUE(tensors.concerns(message, WorkerId(1)));
  tensors.add(life(1, 0));
  EXPECT_TRUE(tensors.concerns(message, WorkerId(1)));
  tensors.add(life(3, 0));
  EXPECT_FALSE(tensors.concerns(message, WorkerId(1)));
}

}  // namespace
}  // namespace direct_bounds_test
