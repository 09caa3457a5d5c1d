// All launches of a device by NCCL are on one stream, and when nothing of it ends for a while all
// of its pairs break and their transfers go by staging.

#include "tests/gpu/transfers_world.h"
#include "tests/support/plain_test.h"

namespace stitch::transport::gpu::test::transfers_stall_test {
namespace {

using namespace stitch::testing;

// What is launched by NCCL on that device begins when the gate is open.
int hold(TransfersWorld& world, std::size_t worker, int device) {
  EXPECT_EQ(world.cuda(worker).set_device(device), cuda::kSuccess);
  return world.gpu.hold(world.process(worker), world.lanes(worker)->lane(device).nccl());
}

void expect_all(TransfersWorld& world,
                const std::vector<std::shared_ptr<TestTransfer>>& transfers) {
  for (const auto& transfer : transfers) {
    world.wait(*transfer);
    world.expect_bytes(*transfer);
  }
}

// So the order of the stream is the agreed one, whatever NCCL does with those of other streams.
TEST(Stalls, SendsAndReceivesOfADeviceAreOnOneStream) {
  TransfersWorld world({.gpu = {.hardware_queues = 0}});
  world.await_path(0, 0, 1, 1, Path::nccl);
  world.await_path(1, 1, 0, 0, Path::nccl);
  const int gate = hold(world, 0, 0);
  const std::size_t before = world.gpu.calls("nccl_group_end", 0);
  const auto sent = world.start(0, 0, 1, 1, 5000, 'a');
  const auto received = world.start(1, 1, 0, 0, 5000, 'b');
  ASSERT_TRUE(eventually([&] { return world.lanes(0)->lane(0).order().launched() == 2; }));
  EXPECT_EQ(world.gpu.calls("nccl_group_end", 0), before + 2);
  EXPECT_FALSE(sent->ended || received->ended);
  world.gpu.open_gate(gate);
  expect_all(world, {sent, received});
  EXPECT_EQ(world.transfers[0]->counters().breaks, 0U);
}

// One transfer is launched behind the one that stalls; then come more than one pair may launch.
TEST(Stalls, WhatIsBehindATransferThatStallsGoesByStagingToo) {
  TransfersWorld world({.workers = 3,
                        .gpu = {.devices = 3, .hardware_queues = 0},
                        .adjust = [](std::size_t worker, DeviceTransfers::Options& options) {
                          options.stall_timeout = worker == 0 ? 2s : 60s;
                          options.reopen_backoff = 1ms;
                        }});
  world.await_path(0, 0, 1, 1, Path::nccl);
  world.await_path(0, 0, 2, 2, Path::nccl);
  const auto staged = world.count(0, 2, Path::staging, true).messages;
  const int gate = hold(world, 1, 1);
  const Lane& lane = world.lanes(0)->lane(0);
  std::vector<std::shared_ptr<TestTransfer>> all{world.start(0, 0, 1, 1, 5000, 'a')};
  ASSERT_TRUE(eventually([&] { return lane.order().launched() == 1; }));
  const auto behind = world.start(0, 0, 2, 2, 5000, 'b');
  ASSERT_TRUE(eventually([&] { return lane.order().launched() == 2; }));
  for (std::size_t i = 0; i < TransferOrder::Limits().launched_by_pair; ++i)
    all.push_back(world.start(0, 0, 1, 1, 5000, 'a'));
  world.wait(*behind);
  all.push_back(behind);
  EXPECT_GE(world.transfers[0]->counters().breaks, 1U);
  EXPECT_EQ(world.count(0, 2, Path::staging, true).messages, staged + 1);
  world.gpu.open_gate(gate);
  expect_all(world, all);
  // Its end was no end of the path.
  world.await_path(0, 0, 1, 1, Path::nccl);
  world.await_path(0, 0, 2, 2, Path::nccl);
}

}  // namespace
}  // namespace stitch::transport::gpu::test::transfers_stall_test
