// A peer whose process is stopped while its connection stays up: what waits for it ends, and gives
// back what it holds. One that is slow is waited for.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/gpu/transfers_world.h"
#include "tests/support/eventually.h"

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
  for (const int to_device : {1, 0}) {  // by staging, by shared memory
    if (to_device == 0) world.await_path(0, 0, 1, 0, Path::ipc);
    world.expect_arrival(0, 0, 2, 1, 5000, 'a');
    const auto used = world.gpu.device_memory_used(0);
    auto transfer = begun(world, 0, 0, 1, to_device, 90 * kMegabyte);
    world.network->freeze(1);
    ASSERT_TRUE(eventually([&] { return transfer->sent == 1; }));
    ASSERT_TRUE(transfer->send_error) << "it was over too soon";
    EXPECT_EQ(transfer->send_error->code(), ErrorCode::timeout) << transfer->send_error->what();
    EXPECT_FALSE(transfer->send_error->remote());
    EXPECT_EQ(world.transfers[0]->under_way(), 0U);
    EXPECT_EQ(world.transfers[0]->counters().silences, to_device == 1 ? 1U : 2U);
    if (to_device == 1) {
      EXPECT_TRUE(eventually([&] { return world.gpu.device_memory_used(0) <= used; }));
    }
    world.expect_arrival(0, 0, 2, 1, 20 * kMegabyte, 'b');  // others go on
    world.network->resume(1);
    world.wait(*transfer);
    EXPECT_TRUE(transfer->receive_error) << "its end hears of it when it goes on";
    world.expect_arrival(0, 0, 1, to_device, 20 * kMegabyte, 'c');
  }
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

// A transfer from worker 0 to that peer on one device, which has got the four slots that it may
// have and copies out of them once the gate opens.
std::shared_ptr<TestTransfer> with_all_its_slots(TransfersWorld& world, std::size_t peer, int gate,
                                                 std::size_t bytes = 100 * kMegabyte) {
  Lane& lane = world.lanes(peer)->lane(0);
  std::promise<void> held;
  lane.post([&] {
    FakeGpu::Kernel kernel;
    kernel.gate = gate;
    EXPECT_EQ(world.gpu.launch(world.process(peer), lane.copies_in(), std::move(kernel)),
              cuda::kSuccess);
    held.set_value();
  });
  held.get_future().wait();
  const auto copies = world.gpu.calls("memcpy_async", world.process(peer));
  const auto transfer = world.start(0, 0, peer, 0, bytes, 'x');
  EXPECT_TRUE(eventually(
      [&] { return world.gpu.calls("memcpy_async", world.process(peer)) == copies + 4; }));
  return transfer;
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

// Through slots of memory that processes share, of the device or of the host.
class SlotSilence : public ::testing::TestWithParam<Path> {
 protected:
  // Leaves no other path but staging.
  static std::function<void(std::size_t, DeviceTransfers::Options&)> by_slots() {
    return [path = GetParam()](std::size_t worker, DeviceTransfers::Options& options) {
      impatient_without_nccl(worker, options);
      options.use_ipc = path == Path::ipc;
      options.use_shared = path == Path::shared;
    };
  }
};
INSTANTIATE_TEST_SUITE_P(By, SlotSilence, ::testing::Values(Path::ipc, Path::shared),
                         [](const auto& info) { return std::string(short_name(info.param)); });

TEST_P(SlotSilence, WhoFindsAllSharedMemoryLentToAStoppedPeerGoesByStaging) {
  TransfersWorld world({.workers = 4, .adjust = by_slots()});
  for (const std::size_t peer : {1U, 2U, 3U}) world.await_path(0, 0, peer, 0, GetParam());
  // Each of two peers is stopped with the four slots that a transfer may have.
  const int gate = world.gpu.make_gate();
  const auto stopped_with_slots = [&](std::size_t peer) {
    const auto transfer = with_all_its_slots(world, peer, gate);
    world.network->freeze(peer);
    return transfer;
  };
  const auto one = stopped_with_slots(1);
  const auto other = stopped_with_slots(3);
  const auto both_end = [&] { return one->sent == 1 && other->sent == 1; };
  ASSERT_TRUE(eventually(both_end)) << [&] {
    const auto counters = world.transfers[0]->counters();
    return "sent " + std::to_string(one->sent) + " and " + std::to_string(other->sent) +
           ", silences " + std::to_string(counters.silences) + ", retries " +
           std::to_string(counters.retries) + ", under way " + std::to_string(counters.outgoing) +
           " and " + std::to_string(counters.incoming);
  }();
  ASSERT_TRUE(one->send_error && other->send_error) << "they were over too soon";
  const auto before = world.count(0, 2, Path::staging, true).messages;
  world.expect_arrival(0, 0, 2, 0, 20 * kMegabyte, 'a');
  EXPECT_GT(world.count(0, 2, Path::staging, true).messages, before);
  // Nor does anything that follows wait for a slot, however often the path could be tried again.
  const auto retries = world.transfers[0]->counters().retries;
  for (int i = 0; i < 8; ++i) {
    world.expect_arrival(0, 0, 2, 0, 1000, 'b');
    std::this_thread::sleep_for(20ms);  // in which the path could be tried again
  }
  EXPECT_EQ(world.transfers[0]->counters().retries, retries);
  world.gpu.open_gate(gate);
  world.network->resume(1);
  world.network->resume(3);
  world.wait(*one);
  world.wait(*other);
  world.await_path(0, 0, 2, 0, GetParam());
  world.expect_arrival(0, 0, 2, 0, 75 * kMegabyte, 'b');
}

// Two peers are lost with all slots: they may live, and still read them.
TEST_P(SlotSilence, NoTransferWaitsForSlotsThatLostPeersMayStillRead) {
  TransfersWorld world({.workers = 5,
                        .processes = {0, 1, 2, 3, 0},
                        .adjust = [](std::size_t worker, DeviceTransfers::Options& options) {
                          by_slots()(worker, options);
                          options.silence_timeout = 60s;
                          options.slot_grace = 2s;
                        }});
  for (const std::size_t peer : {1U, 2U, 3U}) world.await_path(0, 0, peer, 0, GetParam());
  world.await_path(4, 0, 2, 0, GetParam());  // of the same process
  const int gate = world.gpu.make_gate();
  std::vector<std::shared_ptr<TestTransfer>> lost;
  for (const std::size_t peer : {1U, 3U}) lost.push_back(with_all_its_slots(world, peer, gate));
  for (const std::size_t peer : {1U, 3U}) world.lose(peer);
  for (const auto& transfer : lost) ASSERT_TRUE(eventually([&] { return transfer->sent == 1; }));
  const auto begun = std::chrono::steady_clock::now();
  for (const std::size_t source : {0U, 4U}) {
    const auto before = world.count(source, 2, Path::staging, true).messages;
    world.expect_arrival(source, 0, 2, 0, 5000, 'a');
    EXPECT_GT(world.count(source, 2, Path::staging, true).messages, before) << source;
    EXPECT_EQ(world.transfers[source]->counters().retries, 0U) << source;
    EXPECT_TRUE(world.transfers[source]->counters().failures.empty()) << source;
  }
  world.gpu.open_gate(gate);
  for (const std::size_t source : {0U, 4U}) world.await_path(source, 0, 2, 0, GetParam());
  EXPECT_GE(std::chrono::steady_clock::now() - begun, 1s) << "they may still read them";
  world.expect_arrival(0, 0, 2, 0, 75 * kMegabyte, 'b');
}

// Workers 0 and 2 are of one process, whose outbox they share.
TEST_P(SlotSilence, AWorkerThatStopsTakesNoSlotsFromTheOthersOfItsProcess) {
  TransfersWorld world({.workers = 3,
                        .processes = {0, 1, 0},
                        .adjust = [](std::size_t worker, DeviceTransfers::Options& options) {
                          by_slots()(worker, options);
                          options.silence_timeout = 60s;
                          options.slot_grace = 2s;
                        }});
  world.await_path(0, 0, 1, 0, GetParam());
  world.await_path(2, 0, 1, 0, GetParam());
  const int gate = world.gpu.make_gate();
  // Worker 1 reads none of them before the other has stopped.
  const auto first = with_all_its_slots(world, 1, gate);
  const auto second = world.start(0, 0, 1, 0, 75 * kMegabyte, 'b');
  world.shut_down(0, 0ms);
  world.gpu.open_gate(gate);
  ASSERT_TRUE(eventually([&] { return first->sent == 1 && second->sent == 1; }));
  world.await_path(2, 0, 1, 0, GetParam());
  world.expect_arrival(2, 0, 1, 0, 75 * kMegabyte, 'c');
}

// Worker 0 counts worker 1 as lost, which does not know it yet, and uses its slots again.
TEST_P(SlotSilence, WhatALostPeerReadsFromASlotTooLateIsNotItsTransfer) {
  TransfersWorld world({.adjust = [](std::size_t worker, DeviceTransfers::Options& options) {
    by_slots()(worker, options);
    options.silence_timeout = 60s;
    options.slot_grace = 300ms;
  }});
  world.await_path(0, 0, 1, 0, GetParam());
  const int gate = world.gpu.make_gate();
  const auto transfer = with_all_its_slots(world, 1, gate, 30 * kMegabyte);
  world.network->freeze(1);
  world.transfers[0]->on_peer_lost(1, Error(ErrorCode::disconnected, "worker 1 is gone"));
  ASSERT_TRUE(eventually([&] { return transfer->sent == 1; }));
  std::this_thread::sleep_for(600ms);  // in which the slots are free for others
  world.gpu.open_gate(gate);
  EXPECT_EQ(world.gpu.wait_until_idle(), "");
  std::promise<void> looked;
  world.lanes(1)->lane(0).post([&] {  // once its lane has seen that
    world.lanes(1)->lane(0).when_done(world.lanes(1)->lane(0).copies_in(),
                                      [&](cuda::Status) { looked.set_value(); });
  });
  looked.get_future().wait();
  EXPECT_EQ(transfer->received, 0) << "it has what may be another's bytes";
  world.network->resume(1);
  world.lose(1);
  EXPECT_TRUE(eventually([&] { return transfer->received == 1; }));
  EXPECT_TRUE(transfer->receive_error);
}

}  // namespace
}  // namespace stitch::transport::gpu::test::transfers_silence_test
