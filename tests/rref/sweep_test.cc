// What a worker held is reclaimed when the world declares it dead, or when it leaves.

#include <initializer_list>

#include "stitch/rref/frame_kinds.h"
#include "stitch/rref/lifetime/ledger.h"
#include "tests/rref/tables.h"
#include "tests/support/world_test.h"

// Functions of the same names are registered by other units of this program.
namespace stitch::sweep_test {
namespace {

using namespace std::chrono_literals;
using testing::Cluster;
using testing::eventually;

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
RRef<Tally> kept_here() {
  base::MutexLock lock(kept_mutex);
  return kept[rpc::current_agent()->self().name];
}
int use_kept() { return kept_here().rpc_sync<&Tally::add>(1); }
void pass_on(std::string to) { rpc_sync<keep>(to, kept_here()); }
void drop_kept() {
  RRef<Tally> dropped;
  base::MutexLock lock(kept_mutex);
  dropped = std::exchange(kept[rpc::current_agent()->self().name], RRef<Tally>());
  lock.unlock();
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

TEST_F(Sweep, AnObjectThatOnlyADeadWorkerHeldIsReclaimed) {
  Cluster cluster(4);
  rpc_sync<keep>("worker1", remote<Tally>("worker2"));
  ASSERT_TRUE(eventually([&] { return number(cluster, 0, "holds") == 0; })) << tables(cluster);
  EXPECT_EQ(rpc_sync<use_kept>("worker1"), 1);
  cluster[1].shutdown({.graceful = false, .timeout = 1s});
  EXPECT_TRUE(eventually([&] { return number(cluster, 2, "entries") == 0; })) << tables(cluster);
  EXPECT_EQ(number(cluster, 2, "lives_unswept"), 0);
}

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

TEST_F(Sweep, WhatADeadWorkerLentLivesOn) {
  Cluster cluster(4);
  rpc_sync<keep>("worker1", remote<Tally>("worker2"));
  rpc_sync<pass_on>("worker1", "worker3");
  ASSERT_TRUE(eventually([&] { return number(cluster, 0, "holds") == 0; })) << tables(cluster);
  cluster[1].shutdown({.graceful = false, .timeout = 1s});
  ASSERT_TRUE(told(cluster, {0, 2, 3}));
  ASSERT_TRUE(eventually([&] { return number(cluster, 2, "lives_unswept") == 0; }))
      << tables(cluster);
  EXPECT_EQ(rpc_sync<use_kept>("worker3"), 1);
  EXPECT_EQ(number(cluster, 2, "entries"), 1);
  rpc_sync<drop_kept>("worker3");
  EXPECT_TRUE(eventually([&] { return number(cluster, 2, "entries") == 0; })) << tables(cluster);
}

TEST_F(Sweep, WhatALeaverHeldIsReclaimed) {
  Cluster cluster(3, [](Options& options) { options.world_size = "3:3"; });
  rpc_sync<keep>("worker1", remote<Tally>("worker2"));
  ASSERT_TRUE(eventually([&] { return number(cluster, 0, "holds") == 0; })) << tables(cluster);
  cluster[1].shutdown({.timeout = 10s});
  ASSERT_TRUE(told(cluster, {0, 2}));
  EXPECT_TRUE(eventually([&] { return number(cluster, 2, "entries") == 0; })) << tables(cluster);
}

}  // namespace
}  // namespace stitch::sweep_test
