// A path that was refused or broke: what it had goes by staging, and later it is tried again.

#include "tests/gpu/transfers_world.h"
#include "tests/support/plain_test.h"

namespace stitch::transport::gpu::test::transfers_retry_test {
namespace {

using namespace stitch::testing;

std::uint64_t failures(const TransfersWorld& world, std::size_t worker, std::size_t peer,
                       Path path) {
  std::uint64_t sum = 0;
  for (const auto& each : world.transfers[worker]->counters().failures) {
    if (each.peer == peer && each.path == path) sum += each.failures;
  }
  return sum;
}

// Transfers to worker 1 until it has refused the communicator for them.
void await_refusal(TransfersWorld& world) {
  world.gpu.inject(1, "comm_init_rank_config", nccl::kSystemError);
  ASSERT_TRUE(eventually([&] {
    world.expect_arrival(0, 0, 1, 1, 3000, 'a');
    return failures(world, 0, 1, Path::nccl) == 1;
  }));
}

TEST(PathPause, GrowsToAnHourUntilATransferHasComeByThePath) {
  PathPause pause;
  EXPECT_TRUE(pause.over());
  pause.failure(20ms);
  EXPECT_EQ(pause.length(), 20ms);
  pause.failure(20ms);
  EXPECT_EQ(pause.length(), 40ms);
  pause.failure(20ms);
  EXPECT_EQ(pause.length(), 80ms);
  pause.success();
  pause.failure(1s);
  EXPECT_EQ(pause.length(), 1s);
  EXPECT_FALSE(pause.over());
  for (int i = 0; i < 20; ++i) pause.failure(1s);
  EXPECT_EQ(pause.length(), 1h);
}

TEST(Retry, APathThatIsRefusedIsNotTriedBeforeItsPauseIsOver) {
  TransfersWorld world({.adjust = with_long_pauses});
  await_refusal(world);
  for (int i = 0; i < 3; ++i) world.expect_arrival(0, 0, 1, 1, 3000, 'a');
  EXPECT_EQ(world.gpu.calls("nccl_comm_init_rank_config", 1), 1U);
  EXPECT_EQ(failures(world, 0, 1, Path::nccl), 1U);
  EXPECT_EQ(world.transfers[0]->counters().paused, 1U);
}

TEST(Retry, WhatACopyBetweenDevicesHadGoesByStagingWhenItFails) {
  TransfersWorld world({.processes = {0, 0}, .adjust = with_short_pauses});
  world.await_path(0, 0, 1, 1, Path::peer);
  world.gpu.inject(0, "memcpy_peer_async", cuda::kInvalidValue);
  world.expect_arrival(0, 0, 1, 1, 5000, 'a');
  EXPECT_EQ(world.transfers[0]->counters().retries, 1U);
  EXPECT_EQ(failures(world, 1, 0, Path::peer), 1U);
  world.await_path(0, 0, 1, 1, Path::peer);  // it is tested again
}

// What copies of the same time say of one event counts once. On a busy machine the first may fail
// before the next is launched: then they are made once more.
TEST(Retry, SeveralCopiesThatFailTogetherAreOneFailure) {
  for (int round = 0; round < 50; ++round) {
    TransfersWorld world({.processes = {0, 0}, .max_delay = 20ms, .adjust = with_long_pauses});
    world.await_path(0, 0, 1, 1, Path::peer);
    std::vector<std::shared_ptr<TestTransfer>> transfers;
    const int gate = world.gpu.make_gate();
    for (int i = 0; i < 3; ++i) {
      world.gpu.inject(0, "memcpy_peer_async", cuda::kInvalidValue);
      transfers.push_back(world.start(0, 0, 1, 1, 5000, static_cast<char>(i), gate));
    }
    world.gpu.open_gate(gate);
    for (const auto& transfer : transfers) {
      ASSERT_NO_FATAL_FAILURE(world.wait(*transfer));
      world.expect_bytes(*transfer);
    }
    if (world.transfers[0]->counters().retries < 2) continue;
    EXPECT_EQ(failures(world, 1, 0, Path::peer), 1U);
    EXPECT_EQ(failures(world, 0, 1, Path::peer), 0U);
    return;
  }
  ADD_FAILURE() << "they never failed together";
}

TEST(Retry, OfAPeerThatIsLostNoPauseAndNoFailureIsKept) {
  TransfersWorld world({.adjust = with_long_pauses});
  await_refusal(world);
  EXPECT_EQ(world.transfers[0]->counters().paused, 1U);
  world.lose(1);
  EXPECT_TRUE(eventually([&] { return world.transfers[0]->counters().paused == 0; }));
  EXPECT_TRUE(world.transfers[0]->counters().failures.empty());
}

TEST(Retry, CopiesBetweenDevicesThatFailTheirTestAreTestedAgain) {
  TransfersWorld world({.processes = {0, 0}, .adjust = with_short_pauses});
  world.gpu.inject(0, "memcpy_peer_async", cuda::kInvalidValue);
  world.await_path(0, 0, 1, 1, Path::peer);
  EXPECT_EQ(failures(world, 0, 1, Path::peer), 1U);
  EXPECT_TRUE(says(world.said(0, 1).at(0), "peer copies cannot be tested"));
}

// libtorch's memory may be mapped in ways of its own: what is tested is of that kind.
TEST(Retry, CopiesBetweenDevicesAreTestedWithMemoryOfTheLayerAbove) {
  std::atomic<int> tests{0};
  TransfersWorld* made = nullptr;
  TransfersWorld world(
      {.processes = {0, 0}, .adjust = [&](std::size_t, DeviceTransfers::Options& options) {
         options.reopen_backoff = 1ms;
         options.allocate = [&](int, std::size_t bytes, cuda::Stream) -> DeviceMemory {
           if (++tests == 1) throw Error(ErrorCode::overloaded, "out of memory");
           DeviceMemory memory;
           EXPECT_EQ(made->cuda(0).malloc(&memory.data, bytes), cuda::kSuccess);
           memory.owner = std::shared_ptr<void>(memory.data, [&cuda = made->cuda(0)](void* data) {
             EXPECT_EQ(cuda.free(data), cuda::kSuccess);
           });
           return memory;
         };
       }});
  made = &world;
  world.await_path(0, 0, 1, 1, Path::peer);
  EXPECT_EQ(failures(world, 0, 1, Path::peer), 1U);
  EXPECT_EQ(tests, 3);  // one failed, then one at each end
}

// The memory of the test at the source waits for the source's device, on its lane.
TEST(Retry, TestingCopiesBetweenDevicesHoldsUpNothingThatIsForTheDestination) {
  TransfersWorld world({.workers = 3, .processes = {0, 0, 1}, .adjust = without_nccl});
  world.expect_arrival(2, 0, 1, 1, 5000, 'a');  // by staging, whose memory is there from now on
  world.expect_arrival(0, 0, 1, 0, 5000, 'b');  // they know each other
  const int begin = world.gpu.make_gate();
  const auto tested = world.start(0, 0, 1, 1, 5000, 'c', begin);
  const auto next = world.start(2, 0, 1, 1, 5000, 'd', begin);
  EndlessKernel busy(world, 0, 0);
  world.gpu.set_sync_on_alloc(true);
  world.gpu.open_gate(begin);
  // Its own test is what waits for the device of the kernel.
  EXPECT_TRUE(eventually([&] { return next->ended.load(); }));
  busy.end();
  world.wait(*tested);
  world.gpu.set_sync_on_alloc(false);
  world.await_path(0, 0, 1, 1, Path::peer);
}

// Where NCCL's own allocations wait for a device that hangs, the time limits come all the same.
TEST(Retry, ACommunicatorThatCannotBeMadeHoldsUpNoTimeLimit) {
  TransfersWorld world({.adjust = [](std::size_t, DeviceTransfers::Options& options) {
    options.reopen_backoff = 1ms;
    options.open_timeout = 300ms;
  }});
  world.expect_arrival(0, 1, 1, 1, 5000, 'a');  // on one GPU: they know each other, and no more
  const int begin = world.gpu.make_gate();
  const auto transfer = world.start(0, 0, 1, 1, 5000, 'b', begin);
  EndlessKernel busy(world, 0, 0);
  world.gpu.set_sync_on_alloc(true);
  world.gpu.open_gate(begin);
  EXPECT_TRUE(eventually([&] { return failures(world, 0, 1, Path::nccl) > 0; }));
  busy.end();
  world.wait(*transfer);
  world.gpu.set_sync_on_alloc(false);
  world.await_path(0, 0, 1, 1, Path::nccl);
}

// A pause begins anew only once the path has carried something, not when it has passed its test.
TEST(Retry, ACommunicatorThatBreaksWithItsFirstTransferWaitsLongerEachTime) {
  TransfersWorld world({.adjust = [](std::size_t, DeviceTransfers::Options& options) {
    options.reopen_backoff = 100ms;
  }});
  const auto begun = std::chrono::steady_clock::now();
  for (std::uint64_t breaks = 0; breaks < 4; ++breaks) {
    // The first send is the test's.
    world.gpu.inject(0, "send", nccl::kSystemError, 2);
    ASSERT_TRUE(eventually([&] {
      world.expect_arrival(0, 0, 1, 1, 1000, 'a');
      return failures(world, 0, 1, Path::nccl) > breaks;
    }));
  }
  EXPECT_GE(std::chrono::steady_clock::now() - begun, 100ms + 200ms + 400ms);
  EXPECT_EQ(world.count(0, 1, Path::nccl, true).messages, 0U);
}

}  // namespace
}  // namespace stitch::transport::gpu::test::transfers_retry_test
