// A peer whose process is stopped while its connection stays up: what waits for it ends, and gives
// back what it holds. One that is slow is waited for.

#include <future>

#include "tests/gpu/transfers_world.h"
#include "tests/support/plain_test.h"

namespace stitch::transport::gpu::test::transfers_silence_test {
namespace {

using namespace std::chrono_literals;
using stitch::testing::eventually;

constexpr auto kSilence = 1s;

void impatient(std::size_t, DeviceTransfers::Options& options) {
  options.silence_timeout = kSilence;
  options.stall_timeout = 300ms;
  options.reopen_backoff = 1ms;
}
void impatient_without_nccl(std::size_t worker, DeviceTransfers::Options& options) {
  impatient(worker, options);
  options.use_nccl = false;
}

// Starts a transfer and returns in the middle of it, if its two workers have no other.
std::shared_ptr<TestTransfer> begun(TransfersWorld& world, std::size_t from, int from_device,
                                    std::size_t to, int to_device, std::size_t bytes) {
  const auto copies = [&](std::size_t worker) {
    return world.gpu.calls("memcpy_async", world.process(worker));
  };
  const auto before = std::pair(copies(from), copies(to));
  const auto transfer = world.start(from, from_device, to, to_device, bytes, 'x');
  EXPECT_TRUE(
      eventually([&] { return copies(from) > before.first && copies(to) > before.second; }));
  return transfer;
}

TEST(Silence, ATransferToAStoppedPeerEndsAndItsMemoryIsGivenBack) {
  TransfersWorld world({.workers = 3, .adjust = impatient_without_nccl});
  world.expect_arrival(0, 0, 2, 1, 5000, 'a');
  const auto used = world.gpu.device_memory_used(0);
  auto transfer = begun(world, 0, 0, 1, 1, 90 * kMegabyte);
  world.network->freeze(1);
  ASSERT_TRUE(eventually([&] { return transfer->sent == 1; }));
  ASSERT_TRUE(transfer->send_error) << "it was over too soon";
  EXPECT_EQ(transfer->send_error->code(), ErrorCode::timeout) << transfer->send_error->what();
  EXPECT_FALSE(transfer->send_error->remote());
  EXPECT_EQ(world.transfers[0]->under_way(), 0U);
  EXPECT_EQ(world.transfers[0]->counters().silences, 1U);
  EXPECT_TRUE(eventually([&] { return world.gpu.device_memory_used(0) <= used; }));
  world.expect_arrival(0, 0, 2, 1, 20 * kMegabyte, 'b');  // others go on
  world.network->resume(1);
  world.wait(*transfer);
  EXPECT_TRUE(transfer->receive_error) << "its end hears of it when it goes on";
  world.expect_arrival(0, 0, 1, 1, 20 * kMegabyte, 'c');
}

TEST(Silence, ATransferFromAStoppedPeerFailsAndTheOthersGetItsSlots) {
  TransfersWorld world({.workers = 4, .adjust = impatient_without_nccl});
  world.expect_arrival(2, 0, 1, 1, 5000, 'a');
  const auto used = world.gpu.device_memory_used(1);
  // Together they have all slots of the destination's ring.
  const auto one = begun(world, 0, 0, 1, 1, 60 * kMegabyte);
  const auto other = begun(world, 3, 0, 1, 1, 60 * kMegabyte);
  world.network->freeze(0);
  world.network->freeze(3);
  world.expect_arrival(2, 0, 1, 1, 20 * kMegabyte, 'b');
  for (const auto& transfer : {one, other}) {
    ASSERT_TRUE(eventually([&] { return transfer->received == 1; }));
    ASSERT_TRUE(transfer->receive_error) << "it was over too soon";
    EXPECT_EQ(transfer->receive_error->code(), ErrorCode::timeout);
  }
  EXPECT_EQ(world.transfers[1]->under_way(), 0U);
  EXPECT_TRUE(eventually([&] { return world.gpu.device_memory_used(1) <= used + 20 * kMegabyte; }));
  world.network->resume(0);
  world.network->resume(3);
  for (const auto& transfer : {one, other}) {
    world.wait(*transfer);
    EXPECT_TRUE(transfer->send_error);
  }
  world.expect_arrival(0, 0, 1, 1, 20 * kMegabyte, 'c');
}

TEST(Silence, ATransferThatAStoppedPeerHasNotAnnouncedFailsAndIsRefusedLater) {
  TransfersWorld world({.adjust = impatient_without_nccl});
  world.expect_arrival(0, 0, 1, 1, 5000, 'a');
  const int gate = world.gpu.make_gate();
  const auto transfer = world.start(0, 0, 1, 1, 5000, 'b', gate);
  ASSERT_TRUE(eventually([&] { return world.transfers[1]->under_way() == 1; }));
  world.network->freeze(0);
  ASSERT_TRUE(eventually([&] { return transfer->received == 1; }));
  ASSERT_TRUE(transfer->receive_error);
  EXPECT_EQ(transfer->receive_error->code(), ErrorCode::timeout);
  world.network->resume(0);
  world.gpu.open_gate(gate);
  world.wait(*transfer);
  ASSERT_TRUE(transfer->send_error);
  EXPECT_TRUE(transfer->send_error->remote());
  EXPECT_EQ(world.transfers[1]->counters().incoming, 0U);
  world.expect_arrival(0, 0, 1, 1, 5000, 'c');
}

TEST(Silence, ATransferByACommunicatorOfAStoppedPeerEnds) {
  TransfersWorld world({.adjust = impatient});
  world.await_path(0, 0, 1, 1, Path::nccl);
  world.network->freeze(1);
  const auto transfer = world.start(0, 0, 1, 1, 5 * kMegabyte, 'a');
  ASSERT_TRUE(eventually([&] { return transfer->sent == 1; }));
  ASSERT_TRUE(transfer->send_error);
  EXPECT_EQ(transfer->send_error->code(), ErrorCode::timeout);
  world.network->resume(1);
  world.wait(*transfer);
  world.await_path(0, 0, 1, 1, Path::nccl);
}

TEST(Silence, WhatASlowPeerHasStillToDoIsWaitedFor) {
  TransfersWorld world({.adjust = impatient_without_nccl});
  world.expect_arrival(0, 0, 1, 1, 5000, 'a');
  const int gate = world.gpu.make_gate();
  const auto computed = world.start(0, 0, 1, 1, 5000, 'b', gate);
  world.keep_acknowledgments = true;
  const auto unread = world.start(1, 0, 0, 1, 5000, 'c');
  std::this_thread::sleep_for(3 * kSilence);
  EXPECT_EQ(computed->received, 0);
  EXPECT_EQ(unread->received, 1);
  EXPECT_EQ(unread->sent, 0);
  world.keep_acknowledgments = false;
  world.acknowledgments.clear();
  world.gpu.open_gate(gate);
  for (const auto& transfer : {computed, unread}) {
    world.wait(*transfer);
    world.expect_bytes(*transfer);
  }
  EXPECT_EQ(world.transfers[0]->counters().silences + world.transfers[1]->counters().silences, 0U);
}

// What a process on a busy machine does late, again and again: `busy` each time.
void keep_busy(base::TaskThread& thread, const std::shared_ptr<std::atomic<bool>>& stop,
               std::chrono::milliseconds busy) {
  thread.post([&thread, stop, busy] {
    std::this_thread::sleep_for(busy);  // what keeps it, and no wait
    if (!*stop) keep_busy(thread, stop, busy);
  });
}

TEST(Silence, AProcessThatIsAlwaysLateNoticesItAllTheSame) {
  TransfersWorld world({.adjust = impatient_without_nccl});
  world.expect_arrival(0, 0, 1, 1, 5000, 'a');
  const auto stop = std::make_shared<std::atomic<bool>>(false);
  keep_busy(world.lanes(0)->connector(), stop, 520ms);  // more than half of kSilence
  const auto transfer = begun(world, 0, 0, 1, 1, 90 * kMegabyte);
  world.network->freeze(1);
  EXPECT_TRUE(eventually([&] { return transfer->sent == 1; }));
  EXPECT_EQ(world.transfers[0]->counters().silences, 1U);
  *stop = true;
  world.network->resume(1);
  world.wait(*transfer);
}

TEST(Silence, WhatWasSaidWhileAProcessWasStoppedItselfIsReadFirst) {
  TransfersWorld world({.adjust = impatient_without_nccl});
  world.expect_arrival(0, 0, 1, 1, 5000, 'a');
  world.keep_acknowledgments = true;
  const auto transfer = world.start(0, 0, 1, 1, 5000, 'b');
  ASSERT_TRUE(eventually([&] { return transfer->received == 1; }));
  // Worker 0 neither reads nor looks at its clock for some time.
  world.network->pause(0);
  std::promise<void> stopped;
  world.lanes(0)->connector().post([&] {
    std::this_thread::sleep_for(3 * kSilence);  // it is stopped
    stopped.set_value();
  });
  stopped.get_future().wait();
  std::this_thread::sleep_for(kSilence / 10);  // its clock comes first
  world.network->resume(0);
  world.keep_acknowledgments = false;
  world.acknowledgments.clear();
  world.wait(*transfer);
  world.expect_bytes(*transfer);
  EXPECT_EQ(world.transfers[0]->counters().silences, 0U);
}

}  // namespace
}  // namespace stitch::transport::gpu::test::transfers_silence_test
