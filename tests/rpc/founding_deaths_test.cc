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

TEST_P(FoundingDeaths, ADeadWorkerOfAnElasticWorldIsNotInTheWayOfAFixedOne) {
  leave({.world_size = "2:4"});
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

TEST_P(FoundingDeaths, ARestartedWorkerDoesNotWaitForTheOthersToFindItsFormerLife) {
  Options a = a_;
  Options b = b_;
  a.world_size = b.world_size = 3;
  leave(a);
  std::vector<WorldRecord> records(3);
  {
    std::jthread first([&] { records[0] = found_together({a})[0]; });
    EXPECT_TRUE(eventually([&] { return generation() > 0; }));
    std::jthread second([&] { records[1] = found_together({b})[0]; });
    records[2] = found_together({{.name = "c", .rank = 2, .world_size = 3}})[0];
  }
  expect_one_world(records, 3);
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

TEST_P(FoundingDeaths, AFounderDiesRightBeforeItRecordsTheWorld) {
  leave_card(a_);
  std::jthread dies([&] {
    EXPECT_TRUE(has("card/1"));
    store().add(keys::kGeneration, 1);
  });
  expect_one_world(found_one_after_the_other(b_, "card/1", a_));
}

// Nothing says that one of them is the restarted one.
TEST_P(FoundingDeaths, AFounderWithoutANameIsSilentForTooLong) {
  const Options nameless{.world_size = "2:4"};
  leave(nameless);
  expect_one_world(found_together({nameless, nameless}, 600ms));
}

TEST_P(FoundingDeaths, ASlowFounderThatWasTakenForDeadMeetsTheOthersAgain) {
  std::vector<WorldRecord> records(2);
  std::jthread other([&] { records[1] = found_together({b_}, 600ms)[0]; });
  auto slow = make_rendezvous(a_);
  ASSERT_TRUE(slow.meet(record_of(a_), [] { return false; }));
  const auto self = slow.self();
  EXPECT_TRUE(eventually([&] { return generation() > 0; }));
  const auto cards = slow.exchange({self, {}, record_of(a_).encode()});
  ASSERT_TRUE(cards);
  WorldRecord record;
  for (const auto& card : *cards) record.entries.push_back({card, true});
  EXPECT_FALSE(slow.finish(record));
  records[0] = found_together({a_})[0];
  other.join();
  expect_one_world(records);
}

TEST_P(FoundingDeaths, AFounderThatMakesItsEndpointsIsNotTakenForDeadByADuplicate) {
  std::vector<WorldRecord> records(2);
  std::jthread other([&] { records[1] = found_together({b_})[0]; });
  auto slow = make_rendezvous(a_);
  ASSERT_TRUE(slow.meet(record_of(a_), [] { return false; }));
  std::jthread duplicate([&] {
    auto late = make_rendezvous(a_);
    try {
      EXPECT_FALSE(
          late.meet(record_of(a_), [&] { return store().try_get(keys::kWorld).has_value(); }));
    } catch (const Error& error) {  // it came to that before the world was recorded
      EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument, "\"a\" is one too many"));
    }
  });
  EXPECT_FALSE(eventually([&] { return generation() > 0; }, 1500ms)) << "it was taken for dead";
  records[0].number = slow.world_number();
  records[0].size = a_.world_size;
  const auto cards = slow.exchange({slow.self(), {"here:a"}, record_of(a_).encode()});
  ASSERT_TRUE(cards);
  for (const auto& card : *cards) records[0].entries.push_back({card, true});
  EXPECT_TRUE(slow.finish(records[0]));
  other.join();
  duplicate.join();
  expect_one_world(records);
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
        EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument, "rank 0 is taken twice"));
      });
    }
  }
  expect_one_world(found_together({a_, b_}));
  EXPECT_EQ(generation(), 2) << "a founding was given up";
}

// The error is that of the world that is waited for.
TEST_P(FoundingDeaths, AnObjectionIsOverOnceAnotherLifeOfItsWorkerIsThere) {
  leave({.name = "a", .rank = 0, .world_size = 4});
  leave({.name = "c", .rank = 2, .world_size = 3});
  const auto waits_in_vain = [&](Options options) {
    options.world_size = 3;
    return error_of([&] {
      stitch::rpc::Rendezvous founding(options, store(), false, steady_clock::now() + 6s);
      while (!founding.meet(record_of(options), [] { return false; })) {
      }
    });
  };
  std::jthread again([&] {
    EXPECT_TRUE(eventually([&] { return generation() == 1; }));
    static_cast<void>(waits_in_vain(a_));
  });
  EXPECT_TRUE(has_text(waits_in_vain(b_), ErrorCode::timeout, "only these arrived: "));
}

TEST_P(FoundingDeaths, AnObjectionStandsWhereItsWorkerDoesNotComeBack) {
  leave({.name = "a", .rank = 0, .world_size = 4});
  const Error error = error_of([&] {
    stitch::rpc::Rendezvous founding(b_, store(), false, steady_clock::now() + 4s);
    while (!founding.meet(record_of(b_), [] { return false; })) {
    }
  });
  EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument,
                       "worker \"a\" (rank 0) expects a world of 4, worker \"b\" one of 2"));
  EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument, "only these arrived: b"));
}

// Who has told it may have left, so it answers no question.
TEST_P(FoundingDeaths, AWorkerThatWaitsForMoreRecordsHearsWhyTheFoundingHasFailed) {
  Options b = b_;
  b.world_size = 3;
  std::jthread fails([&] {
    EXPECT_TRUE(has("member/0"));
    leave(a_);
    store().set("founding/0/failure", "worker \"b\" expects a world of 3");
    leave(a_);
    store().add(keys::kGeneration, 1);
  });
  const Error error = error_of([&] { static_cast<void>(found(b)); });
  EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument, "expects a world of "));
}

// At its own deadline, before they need have answered.
TEST_P(FoundingDeaths, AWorkerWithoutASlotLeavesThoseInPeaceThatMakeTheirEndpoints) {
  leave(a_);
  leave({.name = "c", .rank = 1, .world_size = 2});
  for (const char* slot : {"0", "1"})
    store().set(std::string("founding/0/answer/") + slot, "0 away");
  const Error error = error_of([&] {
    stitch::rpc::Rendezvous late(b_, store(), false, steady_clock::now() + 1500ms);
    static_cast<void>(late.meet(record_of(b_), [] { return false; }));
  });
  EXPECT_TRUE(has_text(error, ErrorCode::timeout, "for a place in the world of 2"));
  EXPECT_TRUE(has_text(error, ErrorCode::timeout, "founded by: a, c"));
  EXPECT_EQ(generation(), 0);
}

TEST_P(FoundingDeaths, AWorkerWithoutASlotHearsWhyTheFoundingHasFailed) {
  leave(a_);
  leave({.name = "twin", .rank = 0, .world_size = 2});
  std::jthread fails([&] {
    EXPECT_TRUE(eventually([&] { return store().try_get("founding/0/arrived") == "3"; }));
    store().set("founding/0/failure", "rank 0 is taken twice");
    store().add(keys::kGeneration, 1);
  });
  const Error error = error_of([&] { static_cast<void>(found(b_)); });
  EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument, "rank 0 is taken twice"));
}

}  // namespace
}  // namespace founding_deaths_test
