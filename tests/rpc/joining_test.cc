// Workers that join a running world, leave it, and come back to it: all in one process.
#include <malloc.h>

#include "stitch/transport/store/prefix_store.h"
#include "tests/support/world_test.h"

namespace joining_test {
namespace {

using namespace stitch::testing;
using std::chrono::steady_clock;
using stitch::LeaveReason;

int twice(int x) { return 2 * x; }

// Worlds whose workers all meet in one store.
class Joining : public ::testing::Test {
 protected:
  Options elastic(const std::string& name, const char* size = "1:8") const {
    Options options = common();
    options.name = name;
    options.world_size = size;
    return options;
  }
  Options fixed(int rank, int size) const {
    Options options = common();
    options.rank = rank;
    options.world_size = size;
    // A worker that ends before its first connection is declared dead after this.
    options.heartbeat_timeout = std::chrono::milliseconds(1500);
    return options;
  }
  std::vector<Worker> fixed_world(int size) const {
    std::map<int, Worker> by_rank;
    std::mutex mutex;
    {
      on_each(size, [&](int rank) {
        auto worker = stitch::init(fixed(rank, size));
        const std::lock_guard lock(mutex);
        by_rank.emplace(rank, std::move(worker));
      });
    }
    std::vector<Worker> workers;
    for (auto& [rank, worker] : by_rank) workers.push_back(std::move(worker));
    return workers;
  }
  static void shut_down_together(std::vector<Worker> workers) {
    std::vector<std::jthread> threads;
    for (auto& worker : workers) threads.emplace_back([&worker] { worker.shutdown(); });
  }
  // Ends as a process that is killed does, as far as the others can see.
  static void kill(Worker& worker) { worker.shutdown({.graceful = false}); }
  [[nodiscard]] bool is_recorded() const { return keys()->try_get("world").has_value(); }
  // Whether a worker keeps the world.
  [[nodiscard]] bool is_kept() const { return !keys()->claims("keeper", 1, 0ms).empty(); }

 private:
  Options common() const {
    return {.rpc_timeout = 20s, .init_timeout = 30s, .shutdown_timeout = 10s, .store = store_};
  }

  [[nodiscard]] std::shared_ptr<stitch::transport::Store> keys() const {
    return stitch::transport::make_prefix_store("stitch//", store_);
  }

  std::shared_ptr<stitch::transport::Store> store_ = stitch::transport::make_hash_store();
};

TEST_F(Joining, ANewWorkerIsKnownToAllWhenItsInitReturns) {
  auto a = stitch::init(elastic("a"));
  std::mutex mutex;
  std::vector<std::string> joined;
  const auto watch = a.on_join([&](const WorkerInfo& info) {
    const std::lock_guard lock(mutex);
    joined.push_back(info.name);
  });
  EXPECT_EQ(a.world_size(), 1);
  auto b = stitch::init(elastic("b"));
  auto c = stitch::init(elastic(""));
  EXPECT_EQ(c.name(), "worker2");
  EXPECT_EQ(a.world_size(), 3);
  EXPECT_EQ(b.world_size(), 3);
  EXPECT_EQ(a.rpc_sync<twice>("b", 21), 42);
  EXPECT_EQ(b.rpc_sync<twice>("worker2", 4), 8);
  EXPECT_EQ(c.rpc_sync<twice>("a", 5), 10);
  EXPECT_TRUE(eventually([&] {
    const std::lock_guard lock(mutex);
    return joined == std::vector<std::string>{"b", "worker2"};
  }));
}

TEST_F(Joining, AWorkerThatWasDeclaredDeadKeepsTheWorldNoMore) {
  auto a = stitch::init(elastic("a"));
  EXPECT_TRUE(is_kept());
  {
    const WorkerScope scope(a);
    stitch::rpc::current_agent()->fence(Error(ErrorCode::disconnected, "it was declared dead"));
  }
  EXPECT_TRUE(eventually([&] { return !is_kept(); }));
  // Nor when it shuts down, alone as it believes: the record is that of the workers that live.
  EXPECT_TRUE(is_recorded());
  a.shutdown();
  EXPECT_TRUE(is_recorded());
}

TEST_F(Joining, ANextWorkerKeepsTheWorldWhenTheKeeperLeavesOrDies) {
  std::optional<Worker> keeper = stitch::init(elastic("w0"));
  for (int i = 1; i <= 4; ++i) {
    auto next = stitch::init(elastic("w" + std::to_string(i)));
    EXPECT_EQ(next.rpc_sync<twice>(keeper->name(), i), 2 * i);  // else it would miss nothing
    if (i % 2 == 0) {
      kill(*keeper);
    } else {
      keeper->shutdown();
    }
    keeper = std::move(next);
  }
  auto late = stitch::init(elastic("w0"));
  EXPECT_EQ(late.info().epoch, 2U);
  EXPECT_EQ(late.rpc_sync<twice>("w4", 4), 8);
}

TEST_F(Joining, AWorkerLeavesAnElasticWorldAlone) {
  auto a = stitch::init(elastic("a"));
  auto b = stitch::init(elastic("b"));
  std::atomic<int> left{0};
  const auto watch = a.on_leave([&](const WorkerInfo& info, LeaveReason reason) {
    left += info.name == "b" && reason == LeaveReason::left ? 1 : 100;
  });
  const auto began = steady_clock::now();
  b.shutdown();
  EXPECT_LT(steady_clock::now() - began, 5s);
  EXPECT_TRUE(eventually([&] { return left == 1 && a.world_size() == 1; }));
  EXPECT_EQ(error_of([&] { a.rpc_sync<twice>("b", 1); }).code(), ErrorCode::disconnected);
  auto again = stitch::init(elastic("b"));
  EXPECT_EQ(again.info().epoch, 2u);
  EXPECT_EQ(a.rpc_sync<twice>("b", 3), 6);
}

std::atomic<bool> large_made{false};
at::Tensor large() {
  auto result = at::ones({64 << 20}, at::kByte);
  large_made = true;
  return result;
}

TEST_F(Joining, ALeaverSendsItsLargeRepliesFirst) {
  auto a = stitch::init(elastic("a"));
  auto b = stitch::init(elastic("b"));
  large_made = false;
  auto reply = a.rpc_async<large>("b");
  EXPECT_TRUE(eventually([] { return large_made.load(); }));
  b.shutdown();
  EXPECT_EQ(reply.get().numel(), 64 << 20);
}

TEST_F(Joining, ARestartedWorkerIsReachedUnderItsName) {
  auto workers = fixed_world(3);
  const WorkerInfo before = workers[0].worker("worker1");
  kill(workers[1]);
  workers[1] = stitch::init(fixed(1, 3));
  EXPECT_EQ(workers[1].id(), before.id);
  EXPECT_EQ(workers[1].info().epoch, before.epoch + 1);
  for (const int caller : {0, 2}) {
    EXPECT_EQ(workers[static_cast<std::size_t>(caller)].rpc_sync<twice>("worker1", 8), 16);
  }
  EXPECT_EQ(workers[1].rpc_sync<twice>("worker2", 9), 18);
  const Error error = error_of([&] { workers[0].rpc_sync<twice>(before, 1); });
  EXPECT_TRUE(has_text(error, ErrorCode::disconnected,
                       "worker \"worker1\" epoch 1 is gone; it is now epoch 2"));
  EXPECT_EQ(workers[0].world_size(), 3);
  shut_down_together(std::move(workers));
}

TEST_F(Joining, ANameOfALivingWorkerIsRefused) {
  auto workers = fixed_world(2);
  const Error error = error_of([&] { auto worker = stitch::init(fixed(1, 2)); });
  EXPECT_TRUE(has_text(error, ErrorCode::already_exists,
                       "worker \"worker1\" is still alive in epoch 1; another job that meets at "
                       "the same place needs one of its own"));
  EXPECT_EQ(workers[0].rpc_sync<twice>("worker1", 8), 16);  // the first one is untouched
  shut_down_together(std::move(workers));
}

TEST_F(Joining, ThereIsNoRoomBeyondTheMaximum) {
  auto a = stitch::init(elastic("a", "1:2"));
  auto b = stitch::init(elastic("b", "1:2"));
  const Error error = error_of([&] { auto c = stitch::init(elastic("c", "1:2")); });
  EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument, "worker \"c\" is one too many"));
  b.shutdown();
  auto c = stitch::init(elastic("c", "1:2"));
  EXPECT_EQ(a.rpc_sync<twice>("c", 8), 16);
}

TEST_F(Joining, TrafficGoesOnWhileWorkersComeAndGo) {
  auto a = stitch::init(elastic("a"));
  auto b = stitch::init(elastic("b"));
  std::atomic<bool> over{false};
  std::atomic<int> calls{0};
  std::atomic<int> failures{0};
  {
    std::jthread traffic([&] {
      while (!over) {
        try {
          EXPECT_EQ(a.rpc_sync<twice>("b", 2), 4);
          EXPECT_EQ(b.rpc_sync<twice>("a", 3), 6);
          ++calls;
        } catch (const Error& error) {
          ++failures;
          ADD_FAILURE() << error.what();
          over = true;
        }
      }
    });
    for (int i = 1; i <= 6 && !over; ++i) {
      const int before = calls;
      auto c = stitch::init(elastic("c"));
      EXPECT_EQ(c.info().epoch, static_cast<std::uint64_t>(i));
      EXPECT_EQ(a.rpc_sync<twice>("c", i), 2 * i);
      EXPECT_EQ(c.rpc_sync<twice>("b", i), 2 * i);
      if (i % 2 == 0) {
        kill(c);
      } else {
        c.shutdown();
      }
      EXPECT_TRUE(eventually([&] { return calls > before + 10 || over; }));
    }
    over = true;
  }
  EXPECT_EQ(failures, 0);
}

TEST_F(Joining, WorkersThatHaveLeftTakeLittleMemory) {
  Options options = elastic("stays");
  options.transports = {"tcp"};
  auto stays = stitch::init(options);
  constexpr int kWorkers = 30;
  const auto come_and_go = [&](const std::string& name) {
    for (int i = 0; i < kWorkers; ++i) {
      options.name = name + std::to_string(i);
      auto guest = stitch::init(options);
      EXPECT_EQ(guest.rpc_sync<twice>("stays", 1), 2);
      EXPECT_EQ(stays.rpc_sync<twice>(options.name, 2), 4);
      guest.shutdown();
    }
  };
  come_and_go("first");
  const std::size_t before = mallinfo2().uordblks;
  come_and_go("guest");
  const std::size_t after = mallinfo2().uordblks;
  const std::size_t each = (std::max(before, after) - before) / kWorkers;
  EXPECT_LT(each, std::size_t{12} << 10);
}

TEST_F(Joining, ABarrierEndsWhenOneOfItsWorkersLeavesOrDies) {
  auto a = stitch::init(elastic("a"));
  auto b = stitch::init(elastic("b"));
  for (const bool dies : {false, true}) {
    auto c = stitch::init(elastic("c"));
    const std::vector<std::string> names{"a", "b", "c"};
    std::vector<std::optional<Error>> errors(2);
    const auto began = steady_clock::now();
    {
      std::jthread in_a([&] { errors[0] = error_of([&] { a.barrier(names); }); });
      std::jthread in_b([&] { errors[1] = error_of([&] { b.barrier(names); }); });
      std::this_thread::sleep_for(100ms);
      if (dies) {
        kill(c);
      } else {
        c.shutdown();
      }
    }
    EXPECT_LT(steady_clock::now() - began, 10s);
    for (const auto& error : errors) {
      EXPECT_TRUE(has_text(*error, ErrorCode::disconnected, "barrier on worker"));
      EXPECT_TRUE(has_text(*error, ErrorCode::disconnected, "no answer from worker \"c\""));
      EXPECT_EQ(error->worker(), "c");
      if (!dies) {
        EXPECT_TRUE(has_text(*error, ErrorCode::disconnected, "leaves the world"));
      }
    }
  }
  auto c = stitch::init(elastic("c"));  // a new life counts its barriers from the start
  {
    std::vector<std::jthread> threads;
    for (Worker* worker : {&a, &b, &c}) {
      threads.emplace_back([worker] {
        const auto all = worker->all_gather(worker->name(), {"a", "b", "c"});
        EXPECT_EQ(all.size(), 3u);
      });
    }
  }
}

// A program that keeps the epochs of those that live would lose the new one.
TEST_F(Joining, ThatALifeIsOverIsToldBeforeTheNextOne) {
  auto a = stitch::init(elastic("a"));
  std::mutex mutex;
  std::vector<std::string> told;
  Gate gate;
  gate.close();
  const auto note = [&](const std::string& what, const WorkerInfo& info) {
    const std::lock_guard lock(mutex);
    told.push_back(what + ' ' + std::to_string(info.epoch));
  };
  const auto number = [&] {
    const std::lock_guard lock(mutex);
    return told.size();
  };
  const auto joins = a.on_join([&](const WorkerInfo& info) { note("joined", info); });
  stitch::MembershipWatch inner;
  const auto leaves = a.on_leave([&](const WorkerInfo& info) {
    gate.pass();
    inner = a.on_join([&](const WorkerInfo& late) { note("also joined", late); });
    note("gone", info);
  });
  auto b = stitch::init(elastic("b"));
  EXPECT_TRUE(eventually([&] { return number() == 1; }));
  EXPECT_EQ(a.rpc_sync<twice>("b", 1), 2);  // over loopback, nothing else would miss it
  kill(b);
  ASSERT_TRUE(gate.wait_for_arrival());
  b = stitch::init(elastic("b"));
  EXPECT_EQ(a.rpc_sync<twice>("b", 2), 4);
  std::this_thread::sleep_for(100ms);  // it would be told by then, were it not behind
  EXPECT_EQ(number(), 1U) << "it is told after the death";
  gate.open();
  EXPECT_TRUE(eventually([&] { return number() == 3; }));
  auto c = stitch::init(elastic("c"));
  EXPECT_TRUE(eventually([&] { return number() == 5; }));
  const std::lock_guard lock(mutex);
  EXPECT_EQ(told, (std::vector<std::string>{"joined 1", "gone 1", "joined 2", "joined 1",
                                            "also joined 1"}))
      << "the one that was added meanwhile is told what comes later";
}

TEST_F(Joining, AWatchMayStopItselfAndOthers) {
  auto a = stitch::init(elastic("a"));
  std::atomic<int> first{0}, second{0};
  stitch::MembershipWatch own, other;
  own = a.on_join([&](const WorkerInfo&) {
    ++first;
    other.stop();
    own.stop();
  });
  other = a.on_join([&](const WorkerInfo&) { ++second; });
  auto b = stitch::init(elastic("b"));
  EXPECT_TRUE(eventually([&] { return first == 1; }));
  std::atomic<int> last{0};
  const auto watch = a.on_join([&](const WorkerInfo&) { ++last; });
  auto c = stitch::init(elastic("c"));
  EXPECT_TRUE(eventually([&] { return last == 1; }));
  EXPECT_EQ(first, 1);
  EXPECT_EQ(second, 0);
}

TEST_F(Joining, AWorldThatHasEndedIsFollowedByANewOne) {
  for (int i = 0; i < 3; ++i) {
    auto workers = fixed_world(2);
    EXPECT_EQ(workers[0].rpc_sync<twice>("worker1", i), 2 * i);
    EXPECT_EQ(workers[1].info().epoch, 1U);
    shut_down_together(std::move(workers));
  }
}

}  // namespace
}  // namespace joining_test
