// Silence is patient: what a worker may do without being taken for dead. Over shared memory, since
// workers that meet over loopback do not watch each other.
#include "tests/support/world_test.h"

namespace silence_test {
namespace {

using namespace stitch::testing;

int one() { return 1; }

TEST(Silence, OfAPartitionThatEndsInTimeCostsNothing) {
  Cluster cluster(2, {.transports = {"shm"}, .fault = "partition=worker0|worker1@300ms-2s"});
  const auto begun = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - begun < 2500ms) {
    EXPECT_EQ(cluster[0].rpc_sync<one>("worker1"), 1);
    EXPECT_EQ(cluster[1].rpc_sync<one>("worker0"), 1);
    std::this_thread::sleep_for(10ms);
  }
  EXPECT_EQ(cluster[0].debug_info().at("rpc.reconnects"), 0);
}

// Such as a callback of a user's that writes to a file on a host that is away.
TEST(Silence, IsNotThatOfAWorkerWhoseEventLoopStandsStill) {
  Cluster cluster(3, {.heartbeat_timeout = 1s, .transports = {"shm"}});
  for (int rank = 0; rank < 3; ++rank) {
    for (const auto& peer : cluster[rank].workers())
      EXPECT_EQ(cluster[rank].rpc_sync<one>(peer), 1);
  }
  cluster[1].agent()->loop().post([] { std::this_thread::sleep_for(3s); });
  std::this_thread::sleep_for(3500ms);
  for (int rank = 0; rank < 3; ++rank) {
    for (const auto& peer : cluster[rank].workers())
      EXPECT_EQ(cluster[rank].rpc_sync<one>(peer), 1);
    EXPECT_EQ(cluster[rank].agent()->live_members().size(), 3u);
  }
}

}  // namespace
}  // namespace silence_test
