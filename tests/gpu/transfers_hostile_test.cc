// Peers that send frames out of place, and what they leave behind. Frames are given to one end as
// its peer's.

#include "stitch/transport/gpu/transfer_frames.h"
#include "tests/gpu/transfers_world.h"
#include "tests/support/plain_test.h"

namespace stitch::transport::gpu::test::transfers_hostile_test {
namespace {

using namespace stitch::testing;

// Whether worker `to` refuses a frame of the other.
bool refused(TransfersWorld& world, const base::Bytes& frame, std::size_t to = 1) {
  try {
    world.transfers[to]->on_frame(1 - to, frame.span());
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::protocol) << error.what();
    return true;
  }
  return false;
}

// A broken communicator still runs the transfer when the same id is asked for again.
TEST(Hostile, AnIdThatIsUsedAgainIsNotTheTransferOfABrokenCommunicator) {
  constexpr std::size_t kBytes = 5 * kMegabyte;
  constexpr std::size_t kChunk = 2 * kMegabyte;
  TransfersWorld world({});
  world.await_path(0, 0, 1, 1, Path::nccl);
  const TransferId id = world.transfers[0]->new_id() + 1;  // of the next one
  const auto received = world.gpu.calls("nccl_recv", 1);
  world.gpu.inject(0, "group_end", nccl::kSuccess);  // nothing is launched at the source
  const auto first = world.start(0, 0, 1, 1, kBytes, 'a');
  ASSERT_TRUE(eventually([&] { return world.gpu.calls("nccl_recv", 1) > received; }));
  int gate = 0;  // what the communicator has launched does not end
  world.on_lane(1, 1, [&](Lane& lane) { gate = world.gpu.hold(1, lane.nccl()); });
  world.network->pause(0);
  world.transfers[1]->on_frame(0, encode(CancelFrame{id, 12, "no"}).span());

  void* memory = nullptr;
  ASSERT_EQ(world.cuda(1).set_device(1), cuda::kSuccess);
  ASSERT_EQ(world.cuda(1).malloc(&memory, kBytes), cuda::kSuccess);
  std::atomic<int> arrived{0};
  std::optional<Error> error;
  world.transfers[1]->receive(
      0, id, 1, kBytes,
      [&](int, std::size_t, cuda::Stream) {
        return DeviceMemory{memory, std::make_shared<int>(0)};
      },
      [&](std::optional<Error> why, const std::shared_ptr<void>&) {
        error = std::move(why);
        ++arrived;
      });
  const base::Bytes rts = encode(RtsFrame{id, Path::staging, {0, 1, 0}, kBytes, 0});
  world.transfers[1]->on_frame(0, rts.span());
  const std::vector<std::byte> bytes(kChunk, std::byte{7});
  const auto give = [&](std::size_t offset) {  // once there is a slot for it
    const auto part = std::span(bytes).subspan(0, std::min(kChunk, kBytes - offset));
    const base::Bytes data = encode(DataFrame{id, offset, part});
    EXPECT_TRUE(eventually([&] { return !refused(world, data); }));
  };
  give(0);
  const auto written = world.gpu.calls("memcpy_async", 1);
  world.on_lane(1, 1, [](Lane&) {});
  EXPECT_GE(world.gpu.calls("memcpy_async", 1), written);
  world.gpu.open_gate(gate);
  ASSERT_TRUE(eventually([&] { return world.lanes(1)->lane(1).order().launched() == 0; }));
  world.on_lane(1, 1, [](Lane&) {});
  EXPECT_TRUE(refused(world, rts)) << "it has been asked for again";
  EXPECT_EQ(arrived, 0);
  give(kChunk);
  give(2 * kChunk);
  EXPECT_TRUE(eventually([&] { return arrived == 1; }));
  EXPECT_FALSE(error) << error->what();
  world.lose(0);
  EXPECT_TRUE(eventually([&] { return first->sent == 1; }));
  EXPECT_EQ(world.cuda(1).free(memory), cuda::kSuccess);
}

TEST(Hostile, ACommunicatorIsTestedOnce) {
  TransfersWorld world({});
  world.expect_arrival(0, 1, 1, 1, 5000, 'a');  // on one GPU: they know each other, and no more
  ASSERT_TRUE(world.lanes(1)->lane(1).order().acquire(std::chrono::steady_clock::now() +
                                                      std::chrono::seconds(20)));
  const auto first = world.start(0, 0, 1, 1, 5000, 'b');  // begins to open one
  // The source's own test is on its way, or has come; a second one is none of its doing.
  RtsFrame test{0, Path::nccl, {0, 1, 1}, 0, 1};
  EXPECT_TRUE(eventually([&] { return refused(world, encode(test)); }));
  world.lanes(1)->lane(1).order().release();
  world.wait(*first);
  (void)world.take_protocol_error();  // where the source's was the second, or will be
  world.may_come = "second test of a communicator from device 0 to device 1";
}

// Each aborts the one before it, on a thread of its own.
TEST(Hostile, CommunicatorsThatAreOpenedOneAfterAnotherAreFewAtATime) {
  TransfersWorld world({});
  world.expect_arrival(0, 1, 1, 1, 5000, 'a');
  world.network->pause(0);
  const auto open = [](std::uint32_t source, std::uint64_t epoch) {
    return encode(CommOpenFrame{{source, 1, epoch}, nccl::version_code(2, 28, 9), 4096, {}});
  };
  EXPECT_TRUE(refused(world, open(2, 1))) << "of a device that its sender does not have";
  EndlessKernel busy(world, 1, 1);
  world.gpu.set_sync_on_alloc(true);  // none is made before the gate opens
  const auto made = [&world] { return world.gpu.calls("nccl_comm_init_rank_config", 1); };
  const auto before = made();
  for (std::uint64_t epoch = 1; epoch <= 50; ++epoch) {
    EXPECT_FALSE(refused(world, open(0, epoch)));
    if (epoch > 4) continue;
    ASSERT_TRUE(eventually([&] { return made() == before + epoch; })) << epoch;
  }
  world.gpu.set_sync_on_alloc(false);
  busy.end();
  EXPECT_TRUE(eventually([&] { return world.gpu.open_communicators(1) == 0; }));
  EXPECT_EQ(made(), before + 4);
  world.network->resume(0);
}

TEST(Hostile, ADestinationGrantsNoMoreChunksThanItHasSlotsFor) {
  TransfersWorld world({.adjust = without_nccl});
  world.expect_arrival(0, 0, 1, 1, 1000, 'a');
  world.network->pause(1);
  const auto transfer = world.start(0, 0, 1, 1, 20 * kMegabyte, 'b');
  const TransferId id = world.transfers[0]->new_id() - 1;
  EXPECT_TRUE(refused(world, encode(GrantFrame{id, 11}), 0));  // it has 10 chunks
  EXPECT_TRUE(eventually([&] { return !refused(world, encode(GrantFrame{id, 1}), 0); }));
  EXPECT_TRUE(refused(world, encode(GrantFrame{id, 9}), 0)) << "there are not so many slots";
  EXPECT_FALSE(refused(world, encode(GrantFrame{id, 3}), 0));
  world.lose(1);
  EXPECT_TRUE(eventually([&] { return transfer->sent == 1; }));
}

TEST(Hostile, RefusedTransfersThatAreNeverAnnouncedAreFewOrEndTheirPeer) {
  constexpr std::size_t kMany = 100;
  TransfersWorld world({.adjust = [](std::size_t worker, DeviceTransfers::Options& options) {
    without_nccl(worker, options);
    options.max_transfers_per_peer = kMany;
  }});
  const Error why(ErrorCode::overloaded, "not wanted");
  // Those that are announced, or cancelled, are forgotten.
  for (TransferId id = 1; id <= 3 * kMany; ++id) {
    world.transfers[1]->refuse(0, id, why);
    world.transfers[1]->on_frame(
        0, (id % 2 == 0 ? encode(RtsFrame{id, Path::staging, {0, 1, 0}, 10, 0})
                        : encode(CancelFrame{id, 12, "no"}))
               .span());
    world.transfers[1]->on_frame(0, encode(CancelFrame{4 * kMany + id, 12, "no"}).span());
    world.transfers[1]->refuse(0, 4 * kMany + id, why);
  }
  EXPECT_EQ(world.transfers[1]->counters().incoming, 0U);
  for (std::size_t i = 0; i < kMany; ++i) world.transfers[1]->refuse(0, 10'000 + i, why);
  EXPECT_EQ(error_of([&] { world.transfers[1]->refuse(0, 20'000, why); }).code(),
            ErrorCode::protocol);
}

TEST(Hostile, ARefusedTransferByNcclBreaksNoCommunicator) {
  TransfersWorld world({});
  world.await_path(0, 0, 1, 1, Path::nccl);
  for (int i = 0; i < 5; ++i) {
    const auto refused = world.start(0, 0, 1, 1, 5000, 'a', 0, false);
    world.wait(*refused);
    ASSERT_TRUE(refused->send_error);
    EXPECT_TRUE(refused->send_error->remote());
    EXPECT_TRUE(says(refused->send_error->what(), "not wanted"));
  }
  world.expect_arrival(0, 0, 1, 1, 5000, 'b');
  EXPECT_EQ(world.breaks(), 0U);
  EXPECT_EQ(world.lanes(0)->lane(0).order().pending(), 0U);
}

TEST(Hostile, ATextThatIsTooLongIsRefused) {
  TransfersWorld world({.adjust = without_nccl});
  world.expect_arrival(0, 0, 1, 1, 1000, 'a');
  base::Bytes cancel = encode(CancelFrame{9, 12, std::string(2048, 'x')});
  EXPECT_FALSE(refused(world, cancel));
  const std::uint32_t longer = 2049;
  std::memcpy(cancel.data() + 1 + 8 + 1, &longer, sizeof(longer));
  cancel.append("x", 1);
  EXPECT_TRUE(refused(world, cancel));
  EXPECT_EQ(encode(CancelFrame{9, 12, std::string(5000, 'x')}).size(), cancel.size() - 1);
}

// Its announced size is the peer's word alone.
TEST(Hostile, ATransferOfAnAbsurdSizeByNcclFailsAndNoMore) {
  TransfersWorld world({.adjust = with_short_pauses});
  world.await_path(0, 0, 1, 1, Path::nccl);
  constexpr std::size_t kAbsurd = std::size_t{1} << 62;
  constexpr TransferId kId = 77'777;
  std::atomic<int> ended{0};
  std::optional<Error> error;
  world.transfers[1]->receive(
      0, kId, 1, kAbsurd, [](int, std::size_t, cuda::Stream) { return DeviceMemory{}; },
      [&](std::optional<Error> why, const std::shared_ptr<void>&) {
        error = std::move(why);
        ++ended;
      });
  world.transfers[1]->on_frame(0,
                               encode(RtsFrame{kId, Path::nccl, {0, 1, 1}, kAbsurd, 1000}).span());
  ASSERT_TRUE(eventually([&] { return ended == 1; }));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::overloaded) << error->what();
  world.expect_arrival(0, 0, 1, 1, 5000, 'b');
  (void)world.take_protocol_error();  // of worker 0, which has not announced it
}

}  // namespace
}  // namespace stitch::transport::gpu::test::transfers_hostile_test
