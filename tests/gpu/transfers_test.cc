// Device transfers over the double of CUDA and NCCL: each path, its failures, and what follows.

#include <future>

#include "stitch/transport/gpu/transfer_frames.h"
#include "tests/gpu/transfers_world.h"
#include "tests/support/plain_test.h"

namespace stitch::transport::gpu::test::transfers_test {
namespace {

using namespace stitch::testing;

TEST(Transfers, BytesGoByStagingWhereThereIsNoOtherPath) {
  TransfersWorld world({.adjust = without_nccl});
  world.expect_arrival(0, 0, 1, 1, 1, 'a');
  world.expect_arrival(0, 0, 1, 1, 5000, 'b');
  world.expect_arrival(1, 0, 0, 0, 3 * kMegabyte + 1, 'c');
  EXPECT_EQ(world.count(0, 1, Path::staging, true).messages, 2U);
  EXPECT_EQ(world.count(0, 1, Path::staging, true).bytes, 5001U);
  EXPECT_EQ(world.count(1, 0, Path::staging, false).bytes, 5001U);
}

TEST(Transfers, StagedTransfersMayBeLargerThanTheRings) {
  TransfersWorld world({.adjust = without_nccl});
  world.expect_arrivals(2, 0, 0, 1, 1, 37 * kMegabyte + 5);
}

TEST(Transfers, ATransferOfNoBytesAllocatesNothing) {
  TransfersWorld world({});
  world.failing_allocations = 1;
  world.expect_arrival(0, 0, 1, 1, 0, 'a');
  EXPECT_EQ(world.failing_allocations, 1);
}

TEST(Transfers, WorkersOfOneProcessCopyOnTheDevice) {
  TransfersWorld world({.processes = {0, 0}});
  world.await_path(0, 0, 1, 0, Path::local);
  world.expect_arrival(0, 1, 0, 1, 100, 's');  // to itself
  world.await_path(0, 0, 1, 1, Path::peer);
  world.await_path(1, 1, 0, 0, Path::peer);
  EXPECT_EQ(world.gpu.calls("nccl_send"), 0U);
}

TEST(Transfers, CommunicatorsOpenInTheBackgroundAndAreUsedThen) {
  TransfersWorld world({});
  world.expect_arrival(0, 0, 1, 1, 5000, 'a');
  EXPECT_EQ(world.count(0, 1, Path::staging, true).messages, 1U);
  world.await_path(0, 0, 1, 1, Path::nccl);
  world.await_path(1, 1, 0, 0, Path::nccl);
  world.expect_arrival(0, 0, 1, 1, 5 * kMegabyte, 'b');
  EXPECT_GE(world.count(1, 0, Path::nccl, false).bytes, 5 * kMegabyte);
}

TEST(Transfers, CommunicatorsThatAreNotUsedMakeRoomForOthers) {
  TransfersWorld world({.workers = 4, .adjust = [](std::size_t, DeviceTransfers::Options& options) {
                          options.max_communicators = 2;
                          options.unused_time = 0ms;
                          options.reopen_backoff = 1h;
                        }});
  for (int round = 0; round < 2; ++round) {
    for (const std::size_t to : {1U, 2U, 3U}) {
      world.await_path(0, 0, to, 1, Path::nccl);
      EXPECT_LE(world.gpu.open_communicators(0), 3U);  // one may not be aborted yet
    }
  }
  EXPECT_TRUE(eventually([&] { return world.gpu.open_communicators() == 4; }));
  EXPECT_EQ(world.transfers[0]->counters().communicators, (std::map<int, std::size_t>{{0, 2}}));
  for (const auto& transfers : world.transfers) EXPECT_EQ(transfers->counters().breaks, 0U);
  EXPECT_EQ(world.transfers[0]->counters().paused, 0U);
  EXPECT_EQ(world.transfers[0]->counters().retries, 0U);
}

// Both have something under way: a third pair of devices goes by staging, and breaks none.
TEST(Transfers, CommunicatorsInUseAreNotClosed) {
  TransfersWorld world({.workers = 4,
                        .gpu = {.hardware_queues = 0},
                        .adjust = [](std::size_t, DeviceTransfers::Options& options) {
                          options.max_communicators = 2;
                          options.unused_time = 0ms;
                        }});
  for (const std::size_t to : {1U, 2U}) world.await_path(0, 0, to, 1, Path::nccl);
  std::promise<void> go;
  const auto gone = go.get_future().share();
  std::vector<std::shared_ptr<TestTransfer>> begun;
  const std::size_t sends = world.gpu.calls("nccl_send");
  for (const std::size_t to : {1U, 2U}) {
    world.lanes(to)->lane(1).post([gone] { gone.wait(); });
    begun.push_back(world.start(0, 0, to, 1, 5000, 'a'));
  }
  ASSERT_TRUE(eventually([&] { return world.gpu.calls("nccl_send") == sends + 2; }));
  for (int i = 0; i < 3; ++i) world.expect_arrival(0, 0, 3, 1, 5000, 'b');
  EXPECT_TRUE(eventually([&] { return world.count(0, 3, Path::staging, true).messages == 3U; }));
  EXPECT_EQ(world.transfers[0]->counters().breaks, 0U);
  go.set_value();
  for (const auto& transfer : begun) world.wait(*transfer);
  world.await_path(0, 0, 3, 1, Path::nccl);
}

TEST(Transfers, TransfersAboveThePieceSizeGoInPieces) {
  TransfersWorld world({.adjust = [](std::size_t, DeviceTransfers::Options& options) {
    options.nccl_piece_bytes = 4096;
  }});
  world.await_path(0, 0, 1, 1, Path::nccl);
  world.expect_arrival(0, 0, 1, 1, 4096 * 5 + 17, 'b');
  EXPECT_GE(world.gpu.calls("nccl_send"), 6U);
}

TEST(Transfers, ProcessesOnOneDeviceGoByStaging) {
  TransfersWorld world({});
  for (int i = 0; i < 3; ++i) world.expect_arrival(0, 1, 1, 1, 3000, 'a');
  EXPECT_EQ(world.count(0, 1, Path::staging, true).messages, 3U);
  EXPECT_EQ(world.gpu.calls("nccl_comm_init_rank_config"), 0U);
}

TEST(Transfers, ACancelThatCrossesTheEndLeavesNothingBehind) {
  TransfersWorld world({.adjust = without_nccl});
  world.expect_arrival(0, 0, 1, 1, 1000, 'a');
  // Worker 1 has ended transfer 99 with FINISHED when the CANCEL of worker 0 comes.
  constexpr TransferId kEnded = 99;
  world.transfers[1]->on_frame(0, encode(CancelFrame{kEnded, 12, "no"}).span());
  EXPECT_EQ(world.transfers[1]->counters().incoming, 1U);
  FinishedFrame finished;
  finished.id = kEnded;
  finished.failed = 1;
  world.transfers[0]->on_frame(1, encode(finished).span());
  EXPECT_TRUE(eventually([&] { return world.transfers[1]->counters().incoming == 0; }));
}

TEST(Transfers, NothingIsReadBeforeItsEventHasHappened) {
  TransfersWorld world({});
  const int gate = world.gpu.make_gate();
  const auto late = world.start(0, 0, 1, 1, 5000, 'a', gate);
  world.expect_arrival(0, 0, 1, 1, 5000, 'b');  // does not wait for it
  EXPECT_EQ(late->received, 0);
  world.gpu.open_gate(gate);
  world.wait(*late);
  world.expect_bytes(*late);
}

TEST(Transfers, NoPathWaitsForADeviceOrAStream) {
  TransfersWorld world({.workers = 4,
                        .processes = {0, 0, 1, 2},
                        .adjust = [](std::size_t worker, DeviceTransfers::Options& options) {
                          options.use_nccl = worker < 3;
                        }});
  std::vector<std::shared_ptr<TestTransfer>> transfers;
  const auto again = [&](std::size_t to, int to_device, Path path) {
    world.await_path(0, 0, to, to_device, path);
    // To allocate and to free may wait for the device, too.
    const char* const waits[] = {"stream_synchronize", "host_alloc", "free_host"};
    constexpr std::size_t kWaits = std::size(waits);
    std::size_t before[kWaits];
    for (std::size_t i = 0; i < kWaits; ++i) before[i] = world.gpu.calls(waits[i]);
    const std::size_t allocated = world.gpu.calls("malloc");
    const std::size_t freed = world.gpu.calls("free");
    const auto taken = world.count(0, to, path, true).messages;
    for (int i = 0; i < 5; ++i) transfers.push_back(world.start(0, 0, to, to_device, 70000, 'a'));
    for (const auto& transfer : transfers) world.wait(*transfer);
    EXPECT_EQ(world.count(0, to, path, true).messages, taken + 5);
    for (std::size_t i = 0; i < kWaits; ++i)
      EXPECT_EQ(world.gpu.calls(waits[i]), before[i]) << waits[i];
    // The test's own: one at each end of a transfer, of which it frees one, if not yet.
    EXPECT_EQ(world.gpu.calls("malloc"), allocated + 2 * 5);
    EXPECT_LT(world.gpu.calls("free"), freed + 2 * 5);
  };
  again(2, 1, Path::nccl);
  again(1, 0, Path::local);
  again(1, 1, Path::peer);
  again(3, 1, Path::staging);
}

TEST(Transfers, AreUnderWayAtTheirSourceUntilTheirDestinationHasDealtWithThem) {
  for (const Path path : {Path::staging, Path::local, Path::nccl}) {
    TransfersWorld world({.processes = {0, path == Path::local ? 0 : 1},
                          .adjust = path == Path::staging ? without_nccl : nullptr});
    const int to_device = path == Path::local ? 0 : 1;
    world.await_path(0, 0, 1, to_device, path);
    world.keep_acknowledgments = true;
    const auto transfer = world.start(0, 0, 1, to_device, 5000, 'a');
    ASSERT_TRUE(eventually([&] { return transfer->received == 1; }));
    // What the destination sends, and what the source then calls, keeps its order: once a later
    // transfer has ended at its source, this one would have, too.
    world.keep_acknowledgments = false;
    world.expect_arrival(0, 0, 1, to_device, 5000, 'b');
    EXPECT_EQ(transfer->sent, 0) << to_string(path);
    EXPECT_EQ(world.transfers[0]->under_way(), 1U);
    EXPECT_EQ(world.transfers[1]->under_way(), 0U);
    world.acknowledgments.clear();
    world.wait(*transfer);
    world.expect_bytes(*transfer);
  }
}

TEST(Transfers, WithoutMemoryOneTransferFailsAndTheOthersGoOn) {
  for (const Path path : {Path::staging, Path::local, Path::nccl}) {
    TransfersWorld world({.processes = {0, path == Path::local ? 0 : 1},
                          .adjust = path == Path::staging ? without_nccl : nullptr});
    const int to_device = path == Path::local ? 0 : 1;
    world.await_path(0, 0, 1, to_device, path);
    world.failing_allocations = 1;
    const auto failed = world.start(0, 0, 1, to_device, 5000, 'a');
    world.wait(*failed);
    EXPECT_TRUE(failed->send_error && failed->receive_error) << to_string(path);
    EXPECT_EQ(failed->receive_error->code(), ErrorCode::overloaded);
    world.await_path(0, 0, 1, to_device, path);
    EXPECT_EQ(world.transfers[1]->counters().breaks, 0U);
  }
}

TEST(Transfers, ALostPeerFailsItsTransfersAndNoOthers) {
  TransfersWorld world({.workers = 3, .gpu = {.devices = 3}});
  world.await_path(0, 0, 1, 1, Path::nccl);
  world.await_path(0, 0, 2, 2, Path::nccl);
  const int gate = world.gpu.make_gate();
  const auto lost = world.start(0, 0, 1, 1, 5000, 'a', gate);
  const auto back = world.start(1, 1, 0, 0, 5000, 'b', gate);
  world.lose(1);
  ASSERT_TRUE(eventually([&] { return lost->sent == 1 && back->sent == 1; }));
  EXPECT_EQ(lost->send_error->code(), ErrorCode::disconnected);
  EXPECT_EQ(back->send_error->code(), ErrorCode::disconnected);
  world.gpu.open_gate(gate);
  world.await_path(0, 0, 2, 2, Path::nccl);
  const auto after = world.start(0, 0, 1, 1, 0, 'c');
  ASSERT_TRUE(eventually([&] { return after->sent == 1; }));
  EXPECT_EQ(after->send_error->code(), ErrorCode::disconnected);
}

TEST(Transfers, WhatABrokenCommunicatorHadGoesByStaging) {
  for (const char* const function : {"send", "recv", "comm_get_async_error"}) {
    TransfersWorld world({.adjust = with_short_pauses});
    world.await_path(0, 0, 1, 1, Path::nccl);
    world.gpu.inject(std::string(function) == "recv" ? 1 : 0, function, nccl::kSystemError);
    world.expect_arrivals(5, 0, 0, 1, 1, 70000);
    EXPECT_GE(world.transfers[0]->counters().breaks, 1U) << function;
    world.await_path(0, 0, 1, 1, Path::nccl);  // it is opened again
  }
}

TEST(Transfers, ALostDeviceFailsItsTransfersAndNoOthers) {
  TransfersWorld world({.gpu = {.devices = 3}});
  world.await_path(0, 0, 1, 1, Path::nccl);
  world.gpu.break_context(1, 1, cuda::kIllegalAddress);
  for (int i = 0; i < 3; ++i) {
    const auto failed = world.start(0, 0, 1, 1, 5000, 'a');
    world.wait(*failed);
    ASSERT_TRUE(failed->send_error && failed->receive_error);
    if (i == 0) continue;  // it may have ended before the device was asked
    for (const Error& error : {*failed->send_error, *failed->receive_error}) {
      EXPECT_TRUE(says(error.what(), "device 1 is lost to this process until it is restarted: "))
          << i;
    }
  }
  world.expect_arrival(0, 0, 1, 2, 5000, 'b');
  EXPECT_EQ(world.transfers[1]->counters().lost, std::vector<int>{1});
  EXPECT_EQ(world.transfers[0]->counters().lost, std::vector<int>{});
}

TEST(Transfers, ATransferThatStallsGoesByStaging) {
  TransfersWorld world({.adjust = [](std::size_t, DeviceTransfers::Options& options) {
    options.stall_timeout = 1s;
    options.reopen_backoff = 1ms;
  }});
  world.await_path(0, 0, 1, 1, Path::nccl);
  world.gpu.inject(0, "group_end", nccl::kSuccess);  // nothing is launched at the source
  world.expect_arrival(0, 0, 1, 1, 5000, 'a');
  world.expect_arrival(0, 0, 1, 1, 5000, 'b');
  EXPECT_GE(world.transfers[0]->counters().retries, 1U);
}

// All are launched at the source at once, and done one after another.
TEST(Transfers, ASlowQueueOfTransfersDoesNotStall) {
  TransfersWorld world({.adjust = [](std::size_t, DeviceTransfers::Options& options) {
    options.stall_timeout = 1s;
    options.reopen_backoff = 1ms;
  }});
  world.await_path(0, 0, 1, 1, Path::nccl);
  world.allocation_ms = 150;  // on the lane, one after another
  world.expect_arrivals(16, 0, 0, 1, 1, 5000);
  EXPECT_EQ(world.breaks(), 0U);
}

TEST(Transfers, ACtsThatDoesNotComeBreaksThePairAndHoldsNothingBack) {
  TransfersWorld world({.workers = 3,
                        .gpu = {.devices = 3},
                        .adjust = [](std::size_t, DeviceTransfers::Options& options) {
                          options.cts_timeout = 100ms;
                          options.reopen_backoff = 1ms;
                        }});
  world.await_path(0, 0, 1, 1, Path::nccl);
  world.await_path(0, 0, 2, 2, Path::nccl);
  world.network->pause(1);
  const auto late = world.start(0, 0, 1, 1, 5000, 'a');
  const auto other = world.start(0, 0, 2, 2, 5000, 'b');
  world.wait(*other);
  world.expect_bytes(*other);
  ASSERT_TRUE(eventually([&] { return world.transfers[0]->counters().breaks > 0; }));
  world.network->resume(1);
  world.wait(*late);
  world.expect_bytes(*late);
}

TEST(Transfers, FramesThatNoCorrectPeerSendsAreRefused) {
  TransfersWorld world({.adjust = without_nccl});
  const auto refused = [&](const base::Bytes& frame) {
    const Error error = error_of([&] { world.transfers[1]->on_frame(0, frame.span()); });
    return error.code() == ErrorCode::protocol;
  };
  EXPECT_TRUE(refused(encode(CommOpenFrame{{0, 1, 1}, 22809, 4096, {}}))) << "before HELLO";
  world.expect_arrival(0, 0, 1, 1, 5000, 'a');
  base::Bytes empty;
  EXPECT_TRUE(refused(empty));
  const unsigned char unknown[] = {99, 0, 0};
  base::Bytes bytes;
  bytes.append(unknown, sizeof(unknown));
  EXPECT_TRUE(refused(bytes));
  base::Bytes cut = encode(RtsFrame{7, Path::staging, {0, 1, 0}, 10, 0});
  cut.resize(cut.size() - 1);
  EXPECT_TRUE(refused(cut));
  EXPECT_TRUE(refused(encode(RtsFrame{7, static_cast<Path>(9), {0, 1, 0}, 10, 0})));
  EXPECT_TRUE(refused(encode(RtsFrame{7, Path::staging, {0, 4000, 0}, 10, 0})));
  EXPECT_TRUE(refused(encode(CommOpenFrame{{0, 77, 1}, 22809, 4096, {}})));
  EXPECT_TRUE(refused(encode(CommOpenFrame{{0, 1, 1}, 22809, 1, {}})));
  EXPECT_TRUE(refused(encode(CommBreakFrame{{0, 1, 1}, 2, ""})));
  EXPECT_TRUE(refused(encode(CommReadyFrame{{0, 4000, 1}})));
  world.transfers[1]->on_frame(0, encode(RtsFrame{7000, Path::staging, {0, 1, 0}, 10, 0}).span());
  EXPECT_TRUE(refused(encode(RtsFrame{7000, Path::staging, {0, 1, 0}, 10, 0})));
  // Data that was not asked for has no place: its transfer is not under way.
  EXPECT_TRUE(refused(encode(DataFrame{7000, 0, empty.span()})));
  world.expect_arrival(0, 0, 1, 1, 5000, 'b');
}

TEST(Transfers, BytesOfferedWithinAProcessAreTakenOnlyWithTheirKey) {
  TransfersWorld world({});
  Lanes& lanes = *world.lanes(0);
  const int owner = 7;
  const auto offer = [&](std::uint64_t key) {
    lanes.offer(1, 2, {0, &owner, sizeof(owner), nullptr, key});
  };
  offer(55);
  EXPECT_FALSE(lanes.take(1, 2, 0)) << "what a peer can guess";
  EXPECT_FALSE(lanes.take(1, 3, 55));
  const auto taken = lanes.take(1, 2, 55);
  ASSERT_TRUE(taken) << "it is still offered";
  EXPECT_EQ(taken->data, &owner);
  EXPECT_FALSE(lanes.take(1, 2, 55)) << "once";
  offer(56);
  lanes.withdraw(1, 2);
  EXPECT_FALSE(lanes.take(1, 2, 56));
}

TEST(Transfers, RandomBytesAreRefusedOrIgnored) {
  TransfersWorld world({.adjust = without_nccl});
  std::mt19937_64 random(11);
  for (int i = 0; i < 20000; ++i) {
    base::Bytes frame(1 + random() % 200);
    for (std::size_t at = 0; at < frame.size(); ++at) {
      frame.data()[at] = static_cast<std::byte>(random() % 4 == 0 ? random() : random() % 3);
    }
    frame.data()[0] = static_cast<std::byte>(random() % 14);
    try {
      world.transfers[1]->on_frame(0, frame.span());
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), ErrorCode::protocol) << error.what();
    }
  }
}

TEST(Transfers, ShutdownWaitsForWhatIsUnderWay) {
  TransfersWorld world({});
  const auto transfer = world.start(0, 0, 1, 1, 5 * kMegabyte, 'a');
  world.shut_down(0, 20s);
  EXPECT_EQ(transfer->sent, 1);
  EXPECT_FALSE(transfer->send_error);
  const auto late = world.start(0, 0, 1, 1, 0, 'b');
  ASSERT_TRUE(eventually([&] { return late->sent == 1; }));
  EXPECT_EQ(late->send_error->code(), ErrorCode::shutting_down);
}

TEST(Transfers, ShutdownEndsWhatDoesNotEndInTime) {
  TransfersWorld world({});
  const int gate = world.gpu.make_gate();
  const auto transfer = world.start(0, 0, 1, 1, 5000, 'a', gate);
  world.shut_down(0, 10ms);
  EXPECT_EQ(transfer->sent, 1);
  EXPECT_EQ(transfer->send_error->code(), ErrorCode::shutting_down);
  world.wait(*transfer);
  EXPECT_EQ(transfer->receive_error->code(), ErrorCode::shutting_down);
  world.gpu.open_gate(gate);
}

}  // namespace
}  // namespace stitch::transport::gpu::test::transfers_test
