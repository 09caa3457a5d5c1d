// Why a better path is not used is said once for each peer and reason, with versions or the error,
// and counted.

#include "stitch/transport/gpu/transfer_frames.h"
#include "tests/gpu/transfers_world.h"
#include "tests/support/plain_test.h"

namespace stitch::transport::gpu::test::transfers_said_test {
namespace {

using namespace stitch::testing;
using Lines = std::vector<std::string>;

// What worker 0 has said of worker 1 after transfers from its device `from` to device 1 there.
Lines said_after_transfers(TransfersWorld& world, int from) {
  for (int i = 0; i < 6; ++i) world.expect_arrival(0, from, 1, 1, 3000, 'a');
  EXPECT_TRUE(eventually([&] { return !world.said(0, 1).empty(); }));
  for (int i = 0; i < 6; ++i) world.expect_arrival(0, from, 1, 1, 3000, 'b');
  return world.said(0, 1);
}

TEST(Said, VersionsOfNcclThatDoNotMatchAreNamedAtBothEnds) {
  TransfersWorld world({.nccl_versions = {{1, nccl::version_code(2, 26, 5)}}});
  EXPECT_EQ(said_after_transfers(world, 0),
            Lines{"NCCL is not used, pinned memory is: it is 2.28.9 here and 2.26.5 there, and has "
                  "to be the same version at both ends"});
  for (int i = 0; i < 3; ++i) world.expect_arrival(1, 1, 0, 0, 3000, 'c');
  EXPECT_TRUE(eventually([&] { return world.said(1, 0).size() == 1; }));
  EXPECT_TRUE(says(world.said(1, 0).at(0), "2.26.5 here and 2.28.9 there"));
  const auto counters = world.transfers[1]->counters();
  EXPECT_EQ(counters.nccl_version, nccl::version_code(2, 26, 5));
  EXPECT_EQ(counters.peers_nccl, (std::vector<std::pair<PeerId, int>>{{0, 22809}}));
}

// What a secret seals is not sent in plain from host to host; within one it stays there.
TEST(Said, WithASecretNcclIsUsedWithinAHostOnly) {
  const auto sealed = [](bool apart) {
    return [apart](std::size_t worker, DeviceTransfers::Options& options) {
      options.nccl_between_hosts = false;
      if (apart) options.identity.host[0] += worker;
    };
  };
  {
    TransfersWorld world({.adjust = sealed(false)});
    world.await_path(0, 0, 1, 1, Path::nccl);
    EXPECT_EQ(world.said(0, 1), Lines{});
  }
  TransfersWorld world({.adjust = sealed(true)});
  EXPECT_EQ(said_after_transfers(world, 0),
            Lines{"NCCL is not used, pinned memory is: a secret is set, and NCCL between hosts "
                  "encrypts nothing"});
  EXPECT_EQ(world.gpu.calls("nccl_comm_init_rank_config"), 0U);
  // Nor where only the destination has one.
  world.transfers[1]->on_frame(
      0, encode(CommOpenFrame{{0, 1, 1}, nccl::version_code(2, 28, 9), 4096, {}}).span());
  world.expect_arrival(0, 0, 1, 1, 3000, 'd');
  EXPECT_EQ(world.gpu.calls("nccl_comm_init_rank_config"), 0U);
}

TEST(Said, AnEndWithoutNcclIsNamedWithTheReasonIfItIsThisOne) {
  const auto without = [](std::size_t which) {
    return [which](std::size_t worker, DeviceTransfers::Options& options) {
      options.why_no_nccl = "no NCCL: the library is not there";
      if (worker == which) options.use_nccl = false;
    };
  };
  {
    TransfersWorld world({.adjust = without(1)});
    const Lines lines = said_after_transfers(world, 0);
    ASSERT_EQ(lines.size(), 1U);
    EXPECT_TRUE(says(lines[0], "it is 2.28.9 here and none there"));
  }
  {
    TransfersWorld world({.nccl_versions = {{0, 0}}, .adjust = without(9)});
    const Lines lines = said_after_transfers(world, 0);
    ASSERT_EQ(lines.size(), 1U);
    EXPECT_TRUE(says(lines[0], "none (no NCCL: the library is not there) here and 2.28.9 there"));
  }
  // Where a program does without, it knows.
  TransfersWorld world({.adjust = without(0)});
  for (int i = 0; i < 6; ++i) world.expect_arrival(0, 0, 1, 1, 3000, 'a');
  world.end();
  EXPECT_EQ(world.said(0, 1), Lines{});
}

TEST(Said, ACommunicatorThatDoesNotOpenOrFailsItsTestWithTheErrorOfNccl) {
  for (const char* const function : {"comm_init_rank_config", "send"}) {
    TransfersWorld world({.adjust = with_short_pauses});
    world.gpu.inject(0, function, nccl::kSystemError);
    const Lines lines = said_after_transfers(world, 0);
    ASSERT_EQ(lines.size(), 1U);
    EXPECT_TRUE(says(lines[0],
                     "NCCL of device 0 is not used, pinned memory is: NCCL between device 0 "
                     "and device 1: "));
    EXPECT_TRUE(says(lines[0], "unhandled system error"));
    world.await_path(0, 0, 1, 1, Path::nccl);
    EXPECT_EQ(world.said(0, 1).size(), 1U);
  }
}

// A kernel of the program that does not end keeps NCCL's, which is behind it at the destination,
// from being aborted.
TEST(Said, ADeviceThatDoesWithoutNcclAfterAnAbortThatHung) {
  TransfersWorld world(
      {.gpu = {.hardware_queues = 1}, .adjust = [](std::size_t, DeviceTransfers::Options& options) {
         options.stall_timeout = 500ms;
         options.abort_timeout = 2s;
         options.reopen_backoff = 1ms;
       }});
  world.await_path(0, 0, 1, 1, Path::nccl);
  EndlessKernel busy(world, 1, 1);
  const auto hung = world.start(0, 0, 1, 1, 5000, 'a');
  world.wait(*hung);
  const std::string text = "device 1 does not use NCCL after an abort that hung";
  ASSERT_TRUE(hung->send_error && hung->receive_error);
  EXPECT_TRUE(says(hung->receive_error->what(), text));
  EXPECT_TRUE(says(hung->send_error->what(), text));
  EXPECT_TRUE(world.lanes(1)->quarantined(1));
  EXPECT_EQ(world.transfers[1]->counters().without_nccl, std::vector<int>{1});
  EXPECT_TRUE(eventually([&] { return !world.said(1, 0).empty(); }));
  EXPECT_TRUE(says(world.said(1, 0).at(0), text + "; it broke by: "));
  busy.end();
  // It does without from now on, and the source hears why.
  const auto by_nccl = world.count(0, 1, Path::nccl, true).messages;
  for (int i = 0; i < 5; ++i) world.expect_arrival(0, 0, 1, 1, 5000, 'c');
  EXPECT_EQ(world.count(0, 1, Path::nccl, true).messages, by_nccl);
  EXPECT_TRUE(eventually([&] { return !world.said(0, 1).empty(); }));
}

TEST(Said, NothingWhereAllIsWell) {
  TransfersWorld world({.workers = 3, .processes = {0, 0, 1}});
  world.await_path(0, 0, 2, 1, Path::nccl);
  world.await_path(0, 0, 2, 0, Path::staging);
  world.await_path(0, 0, 1, 0, Path::local);
  world.await_path(0, 0, 1, 1, Path::peer);
  world.end();
  for (const std::size_t peer : {1U, 2U}) EXPECT_EQ(world.said(0, peer), Lines{});
}

}  // namespace
}  // namespace stitch::transport::gpu::test::transfers_said_test
