// Workers that die while they found a world: those that start again found it without their former
// lives. Without processes: what a dead worker has left in the store is written by the test.
#include "stitch/rpc/world/rendezvous.h"
#include "stitch/rpc/world/world_record.h"
#include "tests/rpc/founding_fixture.h"
#include "tests/support/world_test.h"

namespace founding_deaths_test {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;
using stitch::Error;
using stitch::ErrorCode;
using stitch::Options;
using stitch::WorkerId;
using stitch::rpc::MemberCard;
using stitch::rpc::WorldRecord;
using stitch::testing::error_of;
using stitch::testing::eventually;
using stitch::testing::has_text;
using stitch::testing::record_of;
namespace keys = stitch::rpc::world_key;

class FoundingDeaths : public stitch::testing::Founding {
 protected:
  const Options a_{.name = "a", .rank = 0, .world_size = 2};
  const Options b_{.name = "b", .rank = 1, .world_size = 2};

  // It takes a slot, writes its record and dies.
  void leave(const Options& options) {
    const auto slot = store().add("founding/0/arrived", 1) - 1;
    auto record = record_of(options);
    record.process = "a former process";
    store().set("founding/0/member/" + std::to_string(slot), record.encode());
  }
  // It does so after it has written its card. REQUIRES: the first slot is its.
  void leave_card(const Options& options) {
    leave(options);
    const auto id = WorkerId(static_cast<std::uint32_t>(options.rank));
    stitch::base::Bytes bytes;
    stitch::base::ByteWriter out(bytes);
    MemberCard{{options.name, id, 1}, {}, record_of(options).encode()}.write(out);
    store().set("founding/0/card/0",
                std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }
  [[nodiscard]] bool has(const std::string& key) {
    return eventually([&] { return store().try_get("founding/0/" + key).has_value(); });
  }
  [[nodiscard]] int generation() {
    return std::stoi(store().try_get(keys::kGeneration).value_or("0"));
  }
  // All have founded one world, in less than the time limit of a founding.
  void expect_one_world(const std::vector<WorldRecord>& records, std::size_t size = 2) {
    for (const auto& record : records) {
      EXPECT_EQ(record.entries.size(), size);
      EXPECT_EQ(record.encode(), records[0].encode());
    }
    EXPECT_EQ(store().try_get(keys::kWorld), records[0].encode());
    EXPECT_LT(steady_clock::now() - began_, 10s);
  }
  // The second begins once the first has done what the key says.
  std::vector<WorldRecord> found_one_after_the_other(const Options& first, const std::string& key,
                                                     const Options& second) {
    std::vector<WorldRecord> records(2);
    std::jthread before([&] { records[0] = found_together({first})[0]; });
    EXPECT_TRUE(has(key));
    records[1] = found_together({second})[0];
    before.join();
    return records;
  }

 private:
  const steady_clock::time_point began_ = steady_clock::now();
};
INSTANTIATE_TEST_SUITE_P(Stores, FoundingDeaths, ::testing::Values("hash", "tcp"),
                         [](const auto& info) { return info.param; });

TEST_P(FoundingDeaths, ADeadWorkerThatExpectedAnotherWorldIsNotInTheWay) {
  leave({.name = "a", .rank = 0, .world_size = 4});
  expect_one_world(found_together({a_, b_}));
}

TEST_P(FoundingDeaths, ARecordThatCannotBeReadFailsOneFoundingOnly) {
  store().add("founding/0/arrived", 1);
  store().set("founding/0/member/0", "of another version");
  const Error error = error_of([&] { static_cast<void>(found(a_)); });
  EXPECT_TRUE(has_text(error, ErrorCode::protocol, store().describe() + " makes no sense"));
  expect_one_world(found_together({a_, b_}));
}

TEST_P(FoundingDeaths, ARestartedWorkerIsNoDuplicateOfItsFormerLife) {
  leave(a_);
  expect_one_world(found_one_after_the_other(a_, "member/1", b_));
}

TEST_P(FoundingDeaths, ARestartedWorkerFindsItsSlotTakenByItsFormerLife) {
  leave(a_);
  expect_one_world(found_one_after_the_other(b_, "card/1", a_));
}

TEST_P(FoundingDeaths, WorkersThatAllDiedAreNotInTheWayOfTheNext) {
  leave(a_);
  leave(b_);
  expect_one_world(found_together({a_, b_}));
}

TEST_P(FoundingDeaths, ASlotWithoutARecordIsGivenUp) {
  store().add("founding/0/arrived", 1);
  expect_one_world(found_one_after_the_other(b_, "member/1", a_));
}

// It was to record the world.
TEST_P(FoundingDeaths, AFounderDiesWhenAllCardsAreThere) {
  leave_card(a_);
  expect_one_world(found_one_after_the_other(b_, "card/1", a_));
}

TEST_P(FoundingDeaths, AFounderDiesRightAfterItHasRecordedTheWorld) {
  leave_card(a_);
  std::jthread dies([&] {
    EXPECT_TRUE(has("card/1"));
    WorldRecord record;
    record.number = std::stoull(store().get("founding/0/number", 20s));
    record.size = 2;
    store().add(keys::kGeneration, 1);
    store().set(keys::kWorld, record.encode());
  });
  const auto records = found_together({b_});
  dies.join();
  EXPECT_EQ(records[0].entries.size(), 2u);
  EXPECT_EQ(WorldRecord::decode(store().try_get(keys::kWorld).value()).number, records[0].number);
  EXPECT_EQ(generation(), 1);
}

// Its next life waits as long as all others do.
TEST_P(FoundingDeaths, AFounderDiesWhileItMakesItsEndpoints) {
  std::vector<WorldRecord> records(2);
  std::jthread other([&] { records[1] = found_together({b_})[0]; });
  ASSERT_TRUE(make_rendezvous(a_).meet(record_of(a_), [] { return false; }));
  records[0] = found_together({a_}, 1500ms)[0];
  other.join();
  expect_one_world(records);
}

TEST_P(FoundingDeaths, AWorkerThatGaveUpIsNotInTheWayOfTheNext) {
  {
    const Error error = error_of([&] {
      stitch::rpc::Rendezvous early(a_, store(), false, steady_clock::now() + 300ms);
      static_cast<void>(early.meet(record_of(a_), [] { return false; }));
    });
    EXPECT_TRUE(has_text(error, ErrorCode::timeout, "only these arrived: a"));
  }
  expect_one_world(found_together({a_, b_}));
  EXPECT_EQ(generation(), 2) << "a founding was given up";
}

TEST_P(FoundingDeaths, TwoWorkersOfOneRankThatLiveGetAnErrorAndTheNextAWorld) {
  const Options twin{.name = "twin", .rank = 0, .world_size = 2};
  {
    std::vector<std::jthread> threads;
    for (const Options* options : {&a_, &twin}) {
      threads.emplace_back([this, options] {
        const Error error = error_of([&] { static_cast<void>(found(*options)); });
        EXPECT_TRUE(has_text(error, ErrorCode::already_exists, "rank 0 is taken twice"));
      });
    }
  }
  expect_one_world(found_together({a_, b_}));
  EXPECT_EQ(generation(), 2) << "a founding was given up";
}

}  // namespace
}  // namespace founding_deaths_test
