// The end of a world: what becomes of its record in the store when its workers shut down.
#include "stitch/rpc/agent/graceful_shutdown.h"
#include "tests/support/world_test.h"

namespace end_of_world_test {
namespace {

using namespace std::chrono_literals;
using stitch::Error;
using stitch::ErrorCode;
using stitch::testing::error_of;
using stitch::testing::eventually;
using Clock = std::chrono::steady_clock;

// A store whose host takes no bytes: a request lasts until the test ends.
class StallingStore : public stitch::transport::Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    pass();
    store_->set(key, value);
  }
  std::string get(const std::string& key, Timeout timeout) override {
    pass();
    return store_->get(key, timeout);
  }
  std::optional<std::string> try_get(const std::string& key) override {
    pass();
    return store_->try_get(key);
  }
  bool erase(const std::string& key) override {
    pass();
    return store_->erase(key);
  }
  Claimed claim(const std::string& key, const std::string& value) override {
    pass();
    return store_->claim(key, value);
  }
  std::map<std::string, std::string> claims(const std::string& prefix, std::size_t count,
                                            Timeout timeout) override {
    pass();
    return store_->claims(prefix, count, timeout);
  }
  std::string describe() const override { return "a store that stalls"; }

  void stall() { stalled_ = true; }
  void go_on() { stalled_ = false; }
  // Whether a request waits.
  bool holds() const { return held_ > 0; }

 private:
  void pass() {
    if (!stalled_) return;
    ++held_;
    // A test that fails before go_on() is to end, too; nothing else tells that it may.
    for (int i = 0; i < 60'000 && stalled_; ++i) std::this_thread::sleep_for(1ms);
    --held_;
  }
  const std::shared_ptr<stitch::transport::Store> store_ = stitch::transport::make_hash_store();
  std::atomic<bool> stalled_{false};
  std::atomic<int> held_{0};
};

// Two workers of a fixed world at a store of the test's own.
class RecordOfTheWorld : public ::testing::Test {
 protected:
  RecordOfTheWorld() {
    std::jthread second([&] { workers[1].emplace(start(1)); });
    workers[0].emplace(start(0));
  }
  [[nodiscard]] bool there() const {
    return !store->try_get("stitch///world").value_or("").empty();
  }
  const std::shared_ptr<stitch::transport::Store> store = stitch::transport::make_hash_store();
  std::optional<stitch::Worker> workers[2];

 private:
  stitch::Worker start(int rank) const {
    return stitch::init({.rank = rank, .world_size = 2, .store = store});
  }
};

TEST_F(RecordOfTheWorld, StaysWhenItsKeeperGivesUpWaitingForTheOthers) {
  EXPECT_EQ(error_of([&] { workers[0]->shutdown({.wait = 100ms}); }).code(), ErrorCode::timeout);
  EXPECT_TRUE(there());
  workers[1]->shutdown({.graceful = false});
}

TEST_F(RecordOfTheWorld, IsGoneWhereverAGracefulShutdownHasReturned) {
  std::jthread keeper([&] {
    workers[0]->shutdown({.timeout = 20s});
    EXPECT_FALSE(there());
  });
  EXPECT_TRUE(
      eventually([&] { return workers[0]->agent()->graceful_shutdown().waiting().has_value(); }));
  EXPECT_TRUE(there());
  workers[1]->shutdown({.timeout = 20s});
  EXPECT_FALSE(there());
}

// The keeper of the world's record cannot take it away, alone in its world and with another.
TEST(ShutdownOfAKeeper, EndsASecondAfterItsLimitWhereTheStoreDoesNotAnswer) {
  for (const bool elastic : {false, true}) {
    const auto store = std::make_shared<StallingStore>();
    const auto start = [&](int rank) {
      stitch::Options options;
      if (elastic) {
        options.name = "keeper";
        options.world_size = "1:2";
      } else {
        options.rank = rank;
        options.world_size = 2;
      }
      options.store = store;
      return stitch::init(std::move(options));
    };
    std::optional<stitch::Worker> keeper, other;
    std::thread second([&] {
      if (!elastic) other.emplace(start(1));
    });
    keeper.emplace(start(0));
    second.join();
    store->stall();
    EXPECT_TRUE(eventually([&] { return store->holds(); }));
    const auto begun = Clock::now();
    try {
      keeper->shutdown({.wait = 100ms, .timeout = 100ms});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::timeout) << error.what();
    }
    EXPECT_LT(Clock::now() - begun, 10s) << "elastic " << elastic;  // 1.1 s
    store->go_on();
    if (other) other->shutdown({.graceful = false});
  }
}

}  // namespace
}  // namespace end_of_world_test
