// A transfer by NCCL that does not end, those that wait behind it, and what their ends say of that.

#include "stitch/transport/gpu/transfer_frames.h"
#include "tests/gpu/transfers_world.h"
#include "tests/support/plain_test.h"

namespace stitch::transport::gpu::test::transfers_stall_test {
namespace {

using namespace std::chrono_literals;
using stitch::testing::eventually;

// What is launched on that stream begins when the gate is open.
void hold(TransfersWorld& world, std::size_t worker, int device, cuda::Stream stream, int gate) {
  ASSERT_EQ(world.cuda(worker).set_device(device), cuda::kSuccess);
  FakeGpu::Kernel kernel;
  kernel.gate = gate;
  ASSERT_EQ(world.gpu.launch(world.process(worker), stream, std::move(kernel)), cuda::kSuccess);
}

// Worker 0 on device 0, and the others each on a device of its own: from it, or to it.
class Stall : public ::testing::TestWithParam<bool> {
 protected:
  static constexpr std::size_t kOthers = 3;

  [[nodiscard]] std::shared_ptr<TestTransfer> start(std::size_t other, char value) {
    const int device = static_cast<int>(other);
    return GetParam() ? world_.start(0, 0, other, device, 5000, value)
                      : world_.start(other, device, 0, 0, 5000, value);
  }
  void open_all() {
    for (std::size_t other = 1; other <= kOthers; ++other) {
      const int device = static_cast<int>(other);
      if (GetParam()) {
        world_.await_path(0, 0, other, device, Path::nccl);
      } else {
        world_.await_path(other, device, 0, 0, Path::nccl);
      }
    }
  }
  // Its launches of these transfers begin when the gate is open.
  void hold(std::size_t other, int gate) {
    const int device = static_cast<int>(other);
    const Lane& lane = world_.lanes(other)->lane(device);
    transfers_stall_test::hold(world_, other, device, GetParam() ? lane.receives() : lane.sends(),
                               gate);
  }
  [[nodiscard]] std::size_t launches() const {
    return world_.gpu.calls("nccl_group_end", world_.process(0));
  }
  [[nodiscard]] std::size_t breaks(std::size_t worker) const {
    return world_.transfers[worker]->counters().breaks;
  }
  void expect_all(const std::vector<std::shared_ptr<TestTransfer>>& transfers) {
    for (const auto& transfer : transfers) {
      world_.wait(*transfer);
      world_.expect_bytes(*transfer);
    }
  }

  TransfersWorld world_{{.workers = 1 + kOthers,
                         .gpu = {.devices = 1 + static_cast<int>(kOthers), .hardware_queues = 0},
                         .adjust = [](std::size_t, DeviceTransfers::Options& options) {
                           options.stall_timeout = 2s;
                         }}};
};
INSTANTIATE_TEST_SUITE_P(FromOneAndToOne, Stall, ::testing::Bool());

TEST_P(Stall, OfOneTransferBreaksNoneOfThoseBehindIt) {
  open_all();
  const int gate = world_.gpu.make_gate();
  hold(1, gate);
  const std::size_t before = launches();
  const auto stalled = start(1, 'a');
  ASSERT_TRUE(eventually([&] { return launches() > before; }));
  expect_all({start(2, 'b'), start(3, 'c')});
  EXPECT_EQ(breaks(0), 1U);
  EXPECT_EQ(breaks(2), 0U);
  EXPECT_EQ(breaks(3), 0U);
  world_.gpu.open_gate(gate);
  expect_all({stalled});
}

// More than may be launched of one pair: what comes after is launched at its other end alone.
TEST_P(Stall, OfManyBreaksNoneWhoseTurnHasNotCome) {
  open_all();
  const int gate = world_.gpu.make_gate();
  hold(1, gate);
  const std::size_t limit = TransferOrder::Limits().launched_by_pair;
  const std::size_t before = launches();
  std::vector<std::shared_ptr<TestTransfer>> stalled;
  for (std::size_t i = 0; i <= limit; ++i) stalled.push_back(start(1, 'a'));
  const Lane& lane = world_.lanes(0)->lane(0);
  ASSERT_TRUE(eventually([&] { return launches() == before + limit && lane.pending() == 1; }));
  expect_all({start(2, 'b')});
  EXPECT_EQ(breaks(0), 1U);
  EXPECT_EQ(breaks(2), 0U);
  world_.gpu.open_gate(gate);
  expect_all(stalled);
}

// It waits longer than that itself.
TEST(Stalls, ASourceThatWaitsAndSaysSoNoMoreIsTakenForStalled) {
  TransfersWorld world({.workers = 3,
                        .gpu = {.devices = 3, .hardware_queues = 0},
                        .adjust = [](std::size_t worker, DeviceTransfers::Options& options) {
                          options.stall_timeout = worker == 2 ? 1s : 60s;
                        }});
  world.await_path(0, 0, 1, 1, Path::nccl);
  world.await_path(0, 0, 2, 2, Path::nccl);
  const int gate = world.gpu.make_gate();
  hold(world, 1, 1, world.lanes(1)->lane(1).receives(), gate);
  const std::size_t sends = world.gpu.calls("nccl_send", world.process(0));
  const std::size_t receives = world.gpu.calls("nccl_recv", world.process(2));
  const auto stalled = world.start(0, 0, 1, 1, 5000, 'a');
  ASSERT_TRUE(eventually([&] { return world.gpu.calls("nccl_send", world.process(0)) > sends; }));
  const auto behind = world.start(0, 0, 2, 2, 5000, 'b');
  ASSERT_TRUE(
      eventually([&] { return world.gpu.calls("nccl_recv", world.process(2)) > receives; }));
  world.network->freeze(0);
  EXPECT_TRUE(eventually([&] { return world.transfers[2]->counters().breaks == 1; }));
  world.network->resume(0);
  world.gpu.open_gate(gate);
  for (const auto& transfer : {stalled, behind}) {
    world.wait(*transfer);
    world.expect_bytes(*transfer);
  }
}

TEST(Stalls, APeerThatSaysForALongTimeThatItWaitsIsNotBelieved) {
  TransfersWorld world({.adjust = [](std::size_t, DeviceTransfers::Options& options) {
    options.stall_timeout = 100ms;
  }});
  world.await_path(0, 0, 1, 1, Path::nccl);
  const auto says_so = [&](std::uint64_t epoch) {
    world.transfers[1]->on_frame(0, encode(CommWaitsFrame{{0, 1, epoch}, 1}).span());
  };
  says_so(77);                                       // of one that is not there
  world.gpu.inject(0, "group_end", nccl::kSuccess);  // nothing is launched at the source
  const auto transfer = world.start(0, 0, 1, 1, 5000, 'a');
  EXPECT_TRUE(eventually([&] {
    says_so(1);
    return world.transfers[1]->counters().breaks > 0;
  }));
  world.wait(*transfer);
  world.expect_bytes(*transfer);
}

}  // namespace
}  // namespace stitch::transport::gpu::test::transfers_stall_test
