// References under load and under faults, over whole worlds in one process.

#include "stitch/rref/agent/frame_kinds.h"
#include "tests/rref/tables.h"
#include "tests/support/world_test.h"

namespace stitch::rref_stress_test {
namespace {

using namespace stitch::testing;
using transport::Fate;

std::atomic<int> objects_made{0};
std::atomic<int> objects_gone{0};

// Aborts if it is used after its destruction.
class Witness {
 public:
  Witness() { ++objects_made; }
  Witness(const Witness&) = delete;
  Witness& operator=(const Witness&) = delete;
  ~Witness() {
    alive_ = 0;
    ++objects_gone;
  }
  int check() const {
    if (alive_ != kAlive) std::abort();
    return 1;
  }

 private:
  static constexpr int kAlive = 0x600d;
  std::atomic<int> alive_ = kAlive;
};

base::Mutex drawer_mutex;
std::map<int, std::vector<RRef<Witness>>> drawers;
void put_away(int drawer, RRef<Witness> witness) {
  base::MutexLock lock(drawer_mutex);
  drawers[drawer].push_back(std::move(witness));
}
void empty_drawer(int drawer) {
  std::vector<RRef<Witness>> gone;
  base::MutexLock lock(drawer_mutex);
  gone.swap(drawers[drawer]);
}
int ask(const RRef<Witness>& witness) { return witness.rpc_sync<&Witness::check>(); }
Future<int> ask_on(RRef<Witness> witness, std::string through) {
  const int direct = co_await witness.rpc_async<&Witness::check>();
  co_return direct + co_await rpc_async<&ask>(through, witness);
}
RRef<Witness> return_it(RRef<Witness> witness) { return witness; }
int slow_start() {
  std::this_thread::sleep_for(20ms);
  return 1;
}
int wait_until_stopped(int) {
  const auto stop = current_stop_token();
  while (!stop.stop_requested()) std::this_thread::sleep_for(1ms);
  return 1;
}

bool all_empty(Cluster& cluster) { return tables_empty(cluster) && objects_made == objects_gone; }
std::string what_is_left(Cluster& cluster) {
  return std::to_string(objects_made - objects_gone) + " objects live\n" + tables(cluster);
}
std::string name_of(std::size_t rank) { return "worker" + std::to_string(rank); }

// Creates, shares and drops at random from one thread of every worker.
void create_share_drop(Cluster& cluster, int cycles_each, std::uint64_t seed) {
  on_each(cluster.size(), [&](int rank) {
    const WorkerScope scope(cluster[rank]);
    std::mt19937_64 random(seed + static_cast<std::uint64_t>(rank));
    const auto size = static_cast<std::uint64_t>(cluster.size());
    for (int i = 0; i < cycles_each; ++i) {
      auto witness = random() % 4 == 0
                         ? rpc_sync<&return_it>(name_of(random() % size),
                                                remote<Witness>(name_of(random() % size)))
                         : remote<Witness>(name_of(random() % size));
      const std::string other = name_of(random() % size);
      switch (random() % 5) {
        case 0:
          EXPECT_EQ(rpc_sync<&ask>(other, witness), 1);
          break;
        case 1:
          EXPECT_EQ(rpc_sync<&ask_on>(other, witness, name_of(random() % size)), 2);
          break;
        case 2:
          rpc_sync<&put_away>(other, rank, witness);
          break;
        case 3:
          notify<&put_away>(other, rank, std::move(witness));
          break;
        default:
          break;  // dropped unused
      }
      if (random() % 16 == 0) rpc_sync<&empty_drawer>(other, rank);
    }
  });
}

void empty_all_drawers(Cluster& cluster) {
  // One-way messages may still be in flight.
  EXPECT_TRUE(eventually([&] {
    for (int rank = 0; rank < cluster.size(); ++rank) empty_drawer(rank);
    return all_empty(cluster);
  })) << what_is_left(cluster);
}

// No worker waits for an answer.
bool none_waits(Cluster& cluster) {
  for (int rank = 0; rank < cluster.size(); ++rank) {
    for (const char* name : {"holds_creating", "holds_registering"}) {
      if (number(cluster, rank, name) != 0) return false;
    }
  }
  return true;
}

// After failed messages a graceful shutdown never counts as many received as sent.
void end_ungracefully(Cluster& cluster) {
  for (int rank = 0; rank < cluster.size(); ++rank) cluster[rank].shutdown({.graceful = false});
}

TEST(RRefStress, TenThousandCyclesAmongFourWorkersLeaveNothing) {
  Cluster cluster(4);
  create_share_drop(cluster, 2500, 1);
  empty_all_drawers(cluster);
  EXPECT_GE(objects_made, 10'000);
}

TEST(RRefStress, ManyThreadsCopyAndDropOneReference) {
  Cluster cluster(2);
  {
    auto witness = remote<Witness>("worker1");
    std::vector<std::jthread> threads;
    for (int t = 0; t < 8; ++t) {
      threads.emplace_back([witness, &cluster] {
        const WorkerScope scope(cluster[0]);
        for (int i = 0; i < 2000; ++i) {
          auto copy = witness;
          auto other = copy;
          copy = RRef<Witness>();
          if (i % 500 == 0) {
            EXPECT_EQ(other.rpc_sync<&Witness::check>(), 1);
          }
        }
      });
    }
    witness = RRef<Witness>();
  }
  EXPECT_TRUE(eventually([&] { return all_empty(cluster); })) << what_is_left(cluster);
}

TEST(RRefFaults, AnOwnerThatGoesDuringACreationFailsIt) {
  Cluster cluster(2);
  const auto never = remote<&wait_until_stopped>("worker1", 1);
  const auto waiting = never.to_here_async();
  cluster[1].shutdown({.graceful = false});
  ASSERT_TRUE(never.when_created().wait_for(10s));
  ASSERT_TRUE(waiting.wait_for(10s));
  // A worker that stops may still send its answer before its connections close.
  for (const Error& error : {never.when_created().error(), waiting.error()}) {
    EXPECT_TRUE(error.code() == ErrorCode::disconnected ||
                error.code() == ErrorCode::shutting_down ||
                error.code() == ErrorCode::remote_exception)
        << error.what();
    EXPECT_EQ(error.worker(), "worker1");
  }
  cluster.shutdown();
}

// Breaks the connection of the message with this number, counted from the construction on;
// `sequence` counts from the construction of the network.
class BreakAt {
 public:
  explicit BreakAt(std::uint64_t number)
      : network_(
            [this, number](std::uint32_t, std::uint32_t, std::uint64_t, const transport::Message&) {
              const bool fail = counted_.fetch_add(1) == number;
              if (fail) hit_ = true;
              return Fate{.fail = fail};
            }) {}
  [[nodiscard]] bool hit() const { return hit_; }

 private:
  std::atomic<std::uint64_t> counted_{0};
  std::atomic<bool> hit_{false};
  const LoopbackFaults network_;  // ends first
};

void use_references() {
  const auto witness = remote<Witness>("worker1");
  EXPECT_EQ(rpc_sync<&ask>("worker2", witness), 1);
  EXPECT_EQ(rpc_sync<&return_it>("worker2", witness), witness);
  rpc_sync<&put_away>("worker2", 0, witness);
  EXPECT_EQ(remote<&slow_start>("worker2").to_here(), 1);
  EXPECT_EQ(witness.rpc_sync<&Witness::check>(), 1);
  EXPECT_EQ(witness.remote<&Witness::check>().to_here(), 1);
  rpc_sync<&empty_drawer>("worker2", 0);
}

TEST(RRefFaults, WhicheverMessageBreaksItsConnectionEveryUseHasAValue) {
  bool broke = true;
  for (std::uint64_t k = 0; broke; ++k) {
    ASSERT_LT(k, 300u) << "the program never ended";
    Cluster cluster(3, {.reconnect_timeout = 30s});
    {
      const BreakAt fault(k);
      EXPECT_NO_THROW(use_references()) << "message " << k;
      broke = fault.hit();
    }
    empty_all_drawers(cluster);
    EXPECT_TRUE(eventually([&] { return all_empty(cluster); }))
        << "message " << k << ": " << what_is_left(cluster);
    EXPECT_TRUE(cluster.shutdown().empty()) << "message " << k;
    if (!broke) {
      EXPECT_GT(k, 10u);
    }
  }
  EXPECT_EQ(objects_made, objects_gone);
}

TEST(RRefFaults, WhicheverMessageBreaksItsConnectionEveryUseEndsWithAValueOrAnError) {
  bool broke = true;
  for (std::uint64_t k = 0; broke; ++k) {
    broke = false;
    Cluster cluster(3, {.rpc_timeout = 2s, .reconnect_timeout = 0s});
    {
      const BreakAt fault(k);
      try {
        use_references();
      } catch (const Error& error) {
        // remote_exception: a call made by a handler failed. timeout: the owner had no connection
        // to the creator and could not learn that no request to create will arrive.
        if (error.code() == ErrorCode::remote_exception) {
          EXPECT_TRUE(contains(error.what(), "stitch::Error: call "))
              << "message " << k << ": " << error.what();
        } else {
          EXPECT_TRUE(error.code() == ErrorCode::disconnected || error.code() == ErrorCode::timeout)
              << "message " << k << ": " << error.what();
        }
      }
      broke = fault.hit();
      if (broke) {
        empty_drawer(0);
        // What was sent to a lost worker, or is owned by one that others have lost, stays; but no
        // worker waits for a message that will not arrive.
        EXPECT_TRUE(eventually([&] { return none_waits(cluster); })) << "message " << k << "\n"
                                                                     << tables(cluster);
        end_ungracefully(cluster);
      }
    }
    ASSERT_LT(k, 200u) << "the program never ended";
    if (!broke) {
      empty_all_drawers(cluster);
      EXPECT_GT(k, 10u);
    }
  }
  EXPECT_EQ(objects_made, objects_gone)
      << "all objects are destroyed with their workers at the latest";
}

TEST(RRefFaults, AMessageThatDidNotLeaveKeepsNoObject) {
  Cluster cluster(3, {.reconnect_timeout = 0s});
  {
    const LoopbackFaults network(
        [](std::uint32_t from, std::uint32_t to, std::uint64_t, const transport::Message&) {
          Fate fate;
          fate.fail = from == 0 && to == 2;
          return fate;
        });
    const auto witness = remote<Witness>("worker1");
    EXPECT_EQ(witness.rpc_sync<&Witness::check>(), 1);
    const auto lent = rpc_async<&put_away>("worker2", 0, witness);
    ASSERT_TRUE(lent.wait_for(20s));
    EXPECT_EQ(lent.error().code(), ErrorCode::disconnected);
  }
  EXPECT_TRUE(eventually([&] { return all_empty(cluster); })) << what_is_left(cluster);
  end_ungracefully(cluster);
}

}  // namespace
}  // namespace stitch::rref_stress_test
