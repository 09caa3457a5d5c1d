// Without threads or memory: what cannot go on ends, and nothing else does.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <new>

#include "stitch/transport/gpu/transfer_frames.h"
#include "tests/gpu/transfers_world.h"
#include "tests/support/eventually.h"
#include "tests/support/no_more_threads.h"

namespace stitch::transport::gpu::test::transfers_shortage_test {
namespace {

using namespace std::chrono_literals;
using stitch::testing::eventually;
using stitch::testing::NoMoreThreads;

void with_short_back_off(std::size_t, DeviceTransfers::Options& options) {
  options.reopen_backoff = 1ms;
}

TEST(Shortage, ACommunicatorIsAbortedOnceThereIsAThreadForIt) {
  TransfersWorld world({.adjust = with_short_back_off});
  world.await_path(0, 0, 1, 1, Path::nccl);
  std::shared_ptr<TestTransfer> transfer;
  {
    const NoMoreThreads none;
    world.gpu.inject(0, "send", nccl::kSystemError);
    transfer = world.start(0, 0, 1, 1, 70000, 'a');
    ASSERT_TRUE(eventually([&] { return world.transfers[0]->counters().breaks > 0; }));
    world.expect_arrival(0, 0, 1, 1, 5000, 'b');  // by staging
  }
  world.wait(*transfer);
  world.expect_bytes(*transfer);
  world.await_path(0, 0, 1, 1, Path::nccl);  // it is opened again
}

TEST(Shortage, TheLossOfAPeerIsDealtWithToTheEnd) {
  TransfersWorld world({});
  world.await_path(0, 0, 1, 1, Path::nccl);
  world.await_path(1, 1, 0, 0, Path::nccl);
  const int gate = world.gpu.make_gate();
  const auto transfer = world.start(0, 0, 1, 1, 5000, 'a', gate);
  {
    const NoMoreThreads none;
    world.lose(1);
    ASSERT_TRUE(eventually([&] { return transfer->sent == 1; }));
  }
  EXPECT_EQ(transfer->send_error->code(), ErrorCode::disconnected);
  world.gpu.open_gate(gate);
  EXPECT_TRUE(eventually([&] { return world.gpu.open_communicators() == 0; }));
}

TEST(Shortage, ACommunicatorForADeviceIsRefusedWhenThereIsNoThreadForIt) {
  std::atomic<int> refusals{0};  // by worker 1
  TransfersWorld world(
      {.gpu = {.devices = 3}, .adjust = [&](std::size_t worker, DeviceTransfers::Options& options) {
         options.reopen_backoff = 1ms;
         if (worker != 1) return;
         options.send_frame = [&, send = options.send_frame](PeerId to, base::Bytes frame) {
           if (kind_of(frame.span()) == FrameKind::comm_break) ++refusals;
           send(to, std::move(frame));
         };
       }});
  world.expect_arrival(0, 1, 1, 1, 5000, 'a');  // on one GPU: they know each other, and no more
  {
    const NoMoreThreads none;  // device 2 of worker 1 has none yet
    EXPECT_NO_THROW(world.transfers[1]->on_frame(
        0, encode(CommOpenFrame{{1, 2, 1}, nccl::version_code(2, 28, 9), 4096, {}}).span()));
    EXPECT_TRUE(eventually([&] { return refusals == 1; }));
  }
  world.await_path(0, 0, 1, 2, Path::nccl);
}

TEST(Shortage, WhatAStepThrowsEndsThatStepAlone) {
  TransfersWorld world({});
  Lane& lane = world.lanes(0)->lane(0);
  std::promise<void> seen;
  lane.post([] { throw std::bad_alloc(); });
  lane.post([&] {
    lane.watch([]() -> bool { throw std::bad_alloc(); });
    lane.watch([&] {
      seen.set_value();
      return true;
    });
  });
  EXPECT_EQ(seen.get_future().wait_for(20s), std::future_status::ready);
  world.expect_arrival(0, 0, 1, 1, 5000, 'a');
}

TEST(Shortage, WhatIsThrownWhileATransferIsTakenOverFailsThatTransfer) {
  TransfersWorld world({.processes = {0, 0}});
  world.await_path(0, 0, 1, 0, Path::local);
  const int gate = world.gpu.make_gate();
  void* memory = nullptr;
  ASSERT_EQ(world.cuda(0).set_device(0), cuda::kSuccess);
  ASSERT_EQ(world.cuda(0).malloc(&memory, 1000), cuda::kSuccess);
  std::atomic<int> sent{0};
  std::atomic<int> received{0};
  std::optional<Error> send_error;
  std::optional<Error> receive_error;
  const TransferId id = world.transfers[0]->send(
      1, 0, {0, memory, 1000}, nullptr, std::make_shared<int>(0), [&](std::optional<Error> error) {
        send_error = std::move(error);
        ++sent;
      });
  world.transfers[1]->receive(
      0, id, 0, 1000, [](int, std::size_t, cuda::Stream) { return DeviceMemory{}; },
      [&](std::optional<Error> error, const std::shared_ptr<void>&) {
        receive_error = std::move(error);
        ++received;
      },
      [](const std::shared_ptr<const void>&) -> bool { throw std::bad_alloc(); });
  ASSERT_TRUE(eventually([&] { return sent == 1 && received == 1; }));
  EXPECT_TRUE(send_error && receive_error);
  world.gpu.open_gate(gate);
  world.expect_arrival(0, 0, 1, 0, 1000, 'b');
  EXPECT_EQ(world.cuda(0).free(memory), cuda::kSuccess);
}

TEST(Shortage, WhatHasNoMemoryHasRoomInTheSinkWhateverPairHasComeFirst) {
  TransfersWorld world(
      {.workers = 3, .adjust = [](std::size_t worker, DeviceTransfers::Options& options) {
         if (worker == 0) options.nccl_piece_bytes = 4096;
       }});
  world.await_path(0, 0, 2, 1, Path::nccl);
  world.await_path(1, 0, 2, 1, Path::nccl);
  world.failing_allocations = 1;
  const auto failed = world.start(1, 0, 2, 1, 5000, 'a');
  world.wait(*failed);
  ASSERT_TRUE(failed->receive_error);
  EXPECT_EQ(failed->receive_error->code(), ErrorCode::overloaded);
  EXPECT_EQ(world.transfers[2]->counters().breaks, 0U);
  world.await_path(1, 0, 2, 1, Path::nccl);
}

}  // namespace
}  // namespace stitch::transport::gpu::test::transfers_shortage_test
