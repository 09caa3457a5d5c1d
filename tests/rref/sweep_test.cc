// What a worker held is reclaimed when the world declares it dead, or when it leaves.

#include <initializer_list>

#include "stitch/rref/agent/frame_kinds.h"
#include "stitch/rref/lifetime/ledger.h"
#include "tests/rref/tables.h"
#include "tests/support/world_test.h"

// Functions of the same names are registered by other units of this program.
namespace stitch::sweep_test {
namespace {

using namespace stitch::testing;

struct Tally {
  int count = 0;
  int add(int by) { return count += by; }
};

base::Mutex kept_mutex;
std::map<std::string, RRef<Tally>> kept;  // by worker
void keep(RRef<Tally> tally) {
  base::MutexLock lock(kept_mutex);
  kept[rpc::current_agent()->self().name] = std::move(tally);
}
// Until each of `ranks` counts one member less.
bool told(Cluster& cluster, std::initializer_list<int> ranks) {
  return eventually([&] {
    for (const int rank : ranks) {
      const auto live = cluster[rank].agent()->live_members().size();
      if (live + 1 != static_cast<std::size_t>(cluster.size())) return false;
    }
    return true;
  });
}

class Sweep : public ::testing::Test {
 protected:
  ~Sweep() override { drop_all(); }
  static void drop_all() {
    base::MutexLock lock(kept_mutex);
    kept.clear();
  }
};

// Only worker 2 has lost its connection to worker 1: the world has not declared it dead.
TEST_F(Sweep, TheLossOfALinkReclaimsNothing) {
  Cluster cluster(4);
  rpc_sync<keep>("worker1", remote<Tally>("worker2"));
  ASSERT_TRUE(eventually([&] { return number(cluster, 0, "holds") == 0; })) << tables(cluster);
  cluster[2].agent()->peers().give_up(cluster[1].info(),
                                      Error(ErrorCode::disconnected, "its link is lost"));
  EXPECT_FALSE(eventually([&] { return number(cluster, 2, "entries") == 0; }, 300ms))
      << "the loss of a link is no verdict";
  EXPECT_EQ(cluster[0].agent()->live_members().size(), 4U);
  for (int rank = 0; rank < cluster.size(); ++rank)
    cluster[rank].shutdown({.graceful = false, .timeout = 1s});
}

TEST_F(Sweep, WhatALeaverHeldIsReclaimed) {
  Cluster cluster(3, {.world_size = "3:3"});
  rpc_sync<keep>("worker1", remote<Tally>("worker2"));
  ASSERT_TRUE(eventually([&] { return number(cluster, 0, "holds") == 0; })) << tables(cluster);
  cluster[1].shutdown({.timeout = 10s});
  ASSERT_TRUE(told(cluster, {0, 2}));
  EXPECT_TRUE(eventually([&] { return number(cluster, 2, "entries") == 0; })) << tables(cluster);
}

}  // namespace
}  // namespace stitch::sweep_test
