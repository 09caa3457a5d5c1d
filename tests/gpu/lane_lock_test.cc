// Other users of NCCL in the process: while they hold a device, transfers run no NCCL on it, and
// neither waits for the other.

#include "stitch/transport/gpu/lane_lock.h"
#include "stitch/transport/gpu/gpu_libraries.h"
#include "tests/gpu/gpu_pair.h"
#include "tests/gpu/transfers_world.h"
#include "tests/support/plain_test.h"

namespace stitch::transport::gpu::test::lane_lock_test {
namespace {

using namespace stitch::testing;
using stitch::gpu::LaneLock;

TEST(LaneLocks, WhileADeviceIsHeldItsTransfersGoByStagingAndCommunicatorsStayOpen) {
  TransfersWorld world({});
  world.await_path(0, 0, 1, 1, Path::nccl);
  world.await_path(1, 1, 0, 0, Path::nccl);
  const auto opened = world.gpu.calls("nccl_comm_init_rank_config");
  for (const std::size_t holder : {0, 1}) {
    LaneLock lock(world.lanes(holder), static_cast<int>(holder), 20s);
    const auto sends = world.gpu.calls("nccl_send");
    const auto staged = world.count(0, 1, Path::staging, true).messages;
    for (int i = 0; i < 5; ++i) {
      world.expect_arrival(0, 0, 1, 1, 5000, 'a');
      world.expect_arrival(1, 1, 0, 0, 5000, 'b');
    }
    EXPECT_EQ(world.gpu.calls("nccl_send"), sends);
    EXPECT_EQ(world.count(0, 1, Path::staging, true).messages, staged + 5);
    lock.unlock();
    const auto by_nccl = world.count(0, 1, Path::nccl, true).messages;
    world.expect_arrival(0, 0, 1, 1, 5000, 'c');
    EXPECT_EQ(world.count(0, 1, Path::nccl, true).messages, by_nccl + 1);
  }
  EXPECT_EQ(world.gpu.calls("nccl_comm_init_rank_config"), opened);
  EXPECT_EQ(world.breaks(), 0U);
}

TEST(LaneLocks, ACommunicatorThatOpensWhileADeviceIsHeldIsTestedAfterwards) {
  for (const std::size_t holder : {0, 1}) {
    TransfersWorld world({});
    world.expect_arrival(0, 1, 1, 1, 5000, 'a');  // on one GPU: they know each other, and no more
    world.network->pause(1);
    const auto first = world.start(0, 0, 1, 1, 5000, 'b');  // begins to open one
    ASSERT_TRUE(eventually([&] { return world.gpu.calls("nccl_comm_init_rank_config") == 1; }));
    LaneLock lock(world.lanes(holder), static_cast<int>(holder), 20s);
    world.network->resume(1);
    world.wait(*first);
    ASSERT_TRUE(eventually([&] { return world.gpu.calls("nccl_comm_init_rank_config") == 2; }));
    for (int i = 0; i < 10; ++i) world.expect_arrival(0, 0, 1, 1, 5000, 'c');
    EXPECT_EQ(world.gpu.calls("nccl_send"), 0U);
    lock.unlock();
    world.await_path(0, 0, 1, 1, Path::nccl);
    EXPECT_EQ(world.gpu.calls("nccl_comm_init_rank_config"), 2U);
  }
}

TEST(LaneLocks, AreCounted) {
  TransfersWorld world({});
  world.await_path(0, 0, 1, 1, Path::nccl);
  LaneLock one(world.lanes(0), 0, 20s);
  LaneLock other(world.lanes(0), 0, 20s);
  one = std::move(other);  // lets go of one
  const auto sends = world.gpu.calls("nccl_send");
  world.expect_arrival(0, 0, 1, 1, 5000, 'a');
  EXPECT_EQ(world.gpu.calls("nccl_send"), sends);
  one.unlock();
  one.unlock();
  world.expect_arrival(0, 0, 1, 1, 5000, 'b');
  EXPECT_EQ(world.gpu.calls("nccl_send"), sends + 1);
}

TEST(LaneLocks, WaitForWhatIsLaunchedAndSayHowLong) {
  TransfersWorld world({});
  world.await_path(0, 0, 1, 1, Path::nccl);
  // A kernel in front of the destination's receive, which its lane's stream waits for.
  world.gpu.inject(1, "group_end", nccl::kSuccess);  // nothing is launched at the destination
  const auto transfer = world.start(0, 0, 1, 1, 5000, 'a');
  ASSERT_TRUE(eventually([&] { return world.lanes(0)->lane(0).order().launched() == 1; }));
  const Error error = error_of([&] { LaneLock(world.lanes(0), 0, 20ms); });
  EXPECT_EQ(error.code(), ErrorCode::timeout);
  EXPECT_EQ(std::string(error.what()),
            "device 0 still runs transfers by NCCL after 20 ms; it is not locked");
  EXPECT_FALSE(world.lanes(0)->lane(0).order().held());
  world.shut_down(0, 0ms);
}

TEST(LaneLocks, OfTheProcessNeedCudaAndADevice) {
  FakeGpu gpu;
  {
    const GpuLibraries none(nullptr, nullptr, "there is no driver");
    const GpuLibraries::Override only(none);
    EXPECT_EQ(error_of([] { static_cast<void>(stitch::gpu::lane_lock(0)); }).code(),
              ErrorCode::invalid_argument);
  }
  const GpuLibraries libraries(&gpu.cuda(0), &gpu.nccl(0), "");
  const GpuLibraries::Override only(libraries);
  LaneLock lock = stitch::gpu::lane_lock(1);
  const auto lanes = Lanes::of_process();
  EXPECT_TRUE(lanes->held(1));
  EXPECT_FALSE(lanes->held(0));
  lock.unlock();
  EXPECT_FALSE(lanes->held(1));
  EXPECT_EQ(error_of([] { static_cast<void>(stitch::gpu::lane_lock(2)); }).code(),
            ErrorCode::invalid_argument);
}

// What c10d does, on the thread of that rank: a collective on a communicator of its own; returns
// when its device has ended it.
void run_collective(GpuPair& pair, int rank) {
  const NcclApi& nccl = pair.world.nccl(rank);
  EXPECT_EQ(pair.world.cuda(rank).set_device(rank), cuda::kSuccess);
  nccl.group_start();
  pair.send(rank, kBytes / 2);
  nccl.recv(pair.memory[rank] + kBytes / 2, kBytes / 2, nccl::kInt8, 1 - rank, pair.comm[rank],
            pair.stream[rank]);
  nccl.group_end();
  EXPECT_EQ(pair.wait(rank), nccl::kSuccess);
  EXPECT_EQ(pair.world.cuda(rank).stream_synchronize(pair.stream[rank]), cuda::kSuccess);
}

// Collectives and transfers between two devices that run one kernel after another, in whatever
// order their threads come to. Returns how often a communicator of transfers was broken.
std::uint64_t breaks_beside_collectives(bool locked, int rounds) {
  TransfersWorld world({.gpu = {.hardware_queues = 1},
                        .adjust = [&](std::size_t, DeviceTransfers::Options& options) {
                          options.reopen_backoff = 1ms;
                          options.stall_timeout = locked ? 15s : 100ms;
                        }});
  world.await_path(0, 0, 1, 1, Path::nccl);
  world.await_path(1, 1, 0, 0, Path::nccl);
  {
    GpuPair pair(world.gpu);
    for (const int rank : {0, 1}) EXPECT_EQ(pair.wait(rank), nccl::kSuccess);
    for (int round = 0; round < rounds && world.breaks() == 0; ++round) {
      const auto rank = [&](int number) {
        const LaneLock lock =
            locked ? LaneLock(world.lanes(static_cast<std::size_t>(number)), number, 20s)
                   : LaneLock();
        run_collective(pair, number);
      };
      std::thread first([&] { rank(0); });
      std::vector<std::shared_ptr<TestTransfer>> transfers;
      for (int i = 0; i < 4; ++i) {
        transfers.push_back(world.start(0, 0, 1, 1, 5000, 'a'));
        transfers.push_back(world.start(1, 1, 0, 0, 5000, 'b'));
      }
      std::thread second([&] { rank(1); });
      for (const auto& transfer : transfers) {
        world.wait(*transfer);
        world.expect_bytes(*transfer);
      }
      first.join();
      second.join();
    }
    for (const int rank : {0, 1})
      EXPECT_EQ(world.gpu.nccl(rank).comm_abort(pair.comm[rank]), nccl::kSuccess);
  }
  return world.breaks();
}

TEST(LaneLocks, CollectivesAndTransfersDoNotWaitForEachOther) {
  EXPECT_EQ(breaks_beside_collectives(true, 100), 0U);
}

TEST(LaneLocks, WithoutThemCollectivesAndTransfersDo) {
  EXPECT_GT(breaks_beside_collectives(false, 1000), 0U);
}

// In one look: a second one may find that it is not held any more, and take that for a broken pair.
TEST(LaneLocks, WhatAHeldDeviceDoesNotTakeIsToldApartFromWhatItHasNoPairFor) {
  TransfersWorld world({});
  LaunchOrder& order = world.lanes(0)->lane(0).order();
  constexpr TransferOrder::Pair kSource = 1000;
  constexpr TransferOrder::Pair kDestination = 1001;
  const auto launch_nothing = [](std::uint64_t) { return Lane::Watch(); };
  order.add_pair(kSource, TransferOrder::End::source, 7, launch_nothing);
  order.add_pair(kDestination, TransferOrder::End::destination, 8, launch_nothing);
  ASSERT_TRUE(order.acquire(std::chrono::steady_clock::now() + 20s));
  EXPECT_TRUE(order.announce(kSource, 1).held);
  EXPECT_TRUE(order.accept(kDestination, 1, 1).held);
  EXPECT_FALSE(order.announce(kSource, 1).clock || order.accept(kDestination, 1, 1).clock);
  order.release();
  EXPECT_FALSE(order.announce(kSource + 2, 1).held || order.announce(kSource + 2, 1).clock);
  EXPECT_FALSE(order.accept(kSource + 2, 1, 1).held || order.accept(kSource + 2, 1, 1).clock);
  EXPECT_TRUE(order.announce(kSource, 1).clock);
  EXPECT_TRUE(order.accept(kDestination, 1, 1).clock);
  (void)order.drop_pair(kSource);
  (void)order.drop_pair(kDestination);
}

}  // namespace
}  // namespace stitch::transport::gpu::test::lane_lock_test
