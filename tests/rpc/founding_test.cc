// How workers meet in a store, without the workers.
#include "stitch/rpc/world/founding.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "stitch/rpc/world/admission.h"
#include "stitch/transport/wire/hello.h"
#include "tests/rpc/founding_fixture.h"
#include "tests/support/contains.h"

namespace founding_test {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;
using stitch::Error;
using stitch::ErrorCode;
using stitch::Options;
using stitch::WorkerId;
using stitch::WorldSize;
using stitch::rpc::KnownLife;
using stitch::rpc::LifeState;
using stitch::rpc::MemberCard;
using stitch::rpc::MemberClaim;
using stitch::rpc::MemberRecord;
using stitch::rpc::WorldRecord;
using stitch::testing::contains;
using stitch::testing::error_of;
using stitch::testing::has_text;
namespace world_key = stitch::rpc::world_key;
using Founders = stitch::testing::Founding;

std::vector<Options> workers_of(int size) {
  std::vector<Options> workers;
  for (int rank = size - 1; rank >= 0; --rank)
    workers.push_back({.name = "w" + std::to_string(rank), .rank = rank, .world_size = size});
  return workers;
}

TEST_F(Founders, AgreeOnTheirWorld) {
  const auto places = found_together({b, a});
  expect_one_world(places);
  const auto& lives = places[0].world.lives;
  EXPECT_EQ(lives[0].card.info, (stitch::WorkerInfo{"a", WorkerId(0), 1}));
  EXPECT_EQ(lives[1].card.info, (stitch::WorkerInfo{"b", WorkerId(1), 1}));
  EXPECT_FALSE(places[0].keeper) << "of worker b";
  EXPECT_TRUE(places[1].keeper) << "of worker a";
  EXPECT_TRUE(store->claims(world_key::kMember, 1, 0ms).empty());
}

TEST_F(Founders, NeedTwoRequestsEach) {
  for (const std::size_t size : {64, 256}) {
    const std::size_t before = store->requests;
    const auto places = found_together(workers_of(static_cast<int>(size)));
    expect_one_world(places);
    EXPECT_LE(store->requests - before, 3 * size) << size << " workers";
    store->erase(world_key::kWorld);
  }
}

TEST_F(Founders, OfALargeWorldAreCheckedInMoments) {
  constexpr int kSize = 1024;
  std::map<std::string, std::string> claims;
  for (const Options& each : workers_of(kSize)) {
    const auto claim = claim_of(each);
    claims.emplace(world_key::kMember + claim.record.token, claim.encode());
  }
  const auto began = steady_clock::now();
  const auto world = stitch::rpc::Founding::form(claims, kSize, 7);
  const std::string text = world.encode();
  EXPECT_EQ(WorldRecord::decode(text).lives.size(), 1024U);
  EXPECT_LT(text.size(), stitch::transport::Store::kMaxValueBytes / 16);
  EXPECT_LT(steady_clock::now() - began, 5s);
}

TEST_F(Founders, OfAnElasticWorldGetIdsAndNames) {
  const auto places = found_together({{.name = "a", .world_size = "3:8"},
                                      {.name = "", .world_size = "3:8"},
                                      {.name = "c", .rank = 5, .world_size = "3:8"}});
  expect_one_world(places);
  std::set<std::string> names;
  std::set<std::uint32_t> ids;
  for (const auto& life : places[0].world.lives) {
    names.insert(life.card.info.name);
    ids.insert(life.card.info.id.value());
  }
  EXPECT_EQ(ids, (std::set<std::uint32_t>{0, 1, 5}));
  EXPECT_TRUE(names.contains("worker0") || names.contains("worker1"));
}

TEST_F(Founders, WithoutANameGetNoneThatIsTaken) {
  std::map<std::string, std::string> claims;
  for (const char* name : {"worker1", "", ""}) {
    const auto claim = claim_of({.name = name, .world_size = "3:8"});
    claims.emplace(world_key::kMember + claim.record.token, claim.encode());
  }
  std::vector<std::string> found;
  for (const auto& life : stitch::rpc::Founding::form(claims, WorldSize("3:8"), 7).lives)
    found.push_back(to_string(life.card.info));
  EXPECT_EQ(found,
            (std::vector<std::string>{"worker \"worker1\" (id 0)", "worker \"worker2\" (id 2)",
                                      "worker \"worker3\" (id 3)"}));
}

TEST_F(Founders, OfOneRankGetAnErrorAndTheNextAWorld) {
  const Options twin{.name = "twin", .rank = 0, .world_size = 2};
  for (const Error& error : fail_together({a, twin})) {
    EXPECT_TRUE(has_text(error, ErrorCode::already_exists, "rank 0 is taken twice"));
    EXPECT_FALSE(contains(error.what(), "another job")) << error.what();
  }
  expect_one_world(found_together({a, b}));
}

TEST_F(Founders, OfTwoJobsAtOnePlaceAreToldSo) {
  for (const Error& error : fail_together({a, a}))
    EXPECT_TRUE(has_text(error, ErrorCode::already_exists,
                         "another job that meets at the same place needs one of its own"));
}

TEST_F(Founders, OfOneNameGetAnError) {
  const Options twin{.name = "a", .rank = 1, .world_size = 2};
  for (const Error& error : fail_together({a, twin}))
    EXPECT_TRUE(has_text(error, ErrorCode::already_exists,
                         "worker name \"a\" is taken twice: by rank 0 and rank 1"));
}

TEST_F(Founders, ThatExpectOtherSizesGetAnError) {
  const Options other{.name = "b", .rank = 1, .world_size = 3};
  for (const Error& error : fail_together({a, other}))
    EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument,
                         "worker \"b\" (rank 1) expects a world of 3, worker \"a\" one of 2"));
}

TEST_F(Founders, ThatAreTooFewAreNamed) {
  for (const Options& options : {a, b}) {
    const Error error = error_of([&] { static_cast<void>(found(options, 300ms)); });
    EXPECT_TRUE(has_text(
        error, ErrorCode::timeout,
        "waited 60000 ms for a world of 2 at hash store: only these arrived: " + options.name));
  }
  expect_one_world(found_together({a, b}));
}

// Both sides say both versions.
TEST_F(Founders, OfAnotherVersionAreToldBoth) {
  const std::string here = std::to_string(stitch::transport::Hello::kVersion);
  const auto other_version = [](std::string text) {
    text[6] = 99;  // behind the mark
    text[7] = 0;
    return text;
  };
  const auto expect_both = [&](const Error& error) {
    EXPECT_TRUE(contains(error.what(), "is of version 99 of stitch's protocols")) << error.what();
    EXPECT_TRUE(contains(error.what(), "this worker has version " + here)) << error.what();
  };
  {
    const auto claim = store->claim("member/x", other_version(claim_of(b).encode())).claim;
    expect_both(error_of([&] { static_cast<void>(found(a)); }));
  }
  const auto keeper = store->claim(world_key::kKeeper, "a").claim;
  store->set(world_key::kWorld, other_version(WorldRecord{}.encode()));
  expect_both(error_of([&] { static_cast<void>(found(b)); }));
}

// Its record is in the way of none.
TEST_F(Founders, FollowADeadWorld) {
  static_cast<void>(found_together({a, b}));
  const auto began = steady_clock::now();
  const auto places = found_together({a, b});
  expect_one_world(places);
  EXPECT_GE(steady_clock::now() - began, stitch::rpc::Founding::kKeeperTime);
  EXPECT_LT(steady_clock::now() - began, 2 * stitch::rpc::Founding::kKeeperTime);
  EXPECT_EQ(places[0].world.lives[0].card.info.epoch, 1U);
}

TEST_F(Founders, WaitForAnAnswerWhereAWorldRuns) {
  const auto keeper = store->claim(world_key::kKeeper, "c").claim;
  store->set(world_key::kWorld, WorldRecord{7}.encode());
  const std::size_t before = store->bytes;
  std::jthread answers([&] {
    const auto claims = store->claims(world_key::kMember, 1, 20s);
    const auto claim = MemberClaim::decode(claims.begin()->second);
    WorldRecord world{8};
    world.lives.push_back({MemberCard{{"a", WorkerId(3), 4}, {}, claim.record.encode()}});
    store->set(world_key::kAnswer + claim.record.token, world.encode());
  });
  const auto place = found(a);
  EXPECT_EQ(place.world.number, 8U);
  EXPECT_EQ(place.world.lives[0].card.info.epoch, 4U);
  EXPECT_FALSE(place.keeper);
  EXPECT_LT(store->bytes - before, 1000U) << "of a record that says only that a world runs";
}

KnownLife life_of(const std::string& name, std::uint32_t id, LifeState state = LifeState::alive) {
  MemberRecord record;
  record.size = 3;
  record.name = name;
  record.token = "token of " + name;
  return {{{name, WorkerId(id), 1}, {"shm:x"}, record.encode()}, state};
}

TEST(Admission, GivesANewNameAFreeIdAndAnOldOneItsOwn) {
  const std::vector<KnownLife> lives{life_of("worker0", 0), life_of("worker1", 1, LifeState::dead),
                                     life_of("x", 3)};
  const auto place = [&](const std::string& name, std::int64_t rank, const WorldSize& size) {
    MemberRecord joiner;
    joiner.name = name;
    joiner.rank = rank;
    joiner.size = size;
    return stitch::rpc::place_for(joiner, lives, size.is_elastic() ? WorldSize("1:8") : 2, "here");
  };
  const auto none = MemberRecord::kNoRank;
  EXPECT_EQ(place("worker1", 1, 2), (stitch::WorkerInfo{"worker1", WorkerId(1), 2}));
  EXPECT_EQ(place("y", none, "1:8"), (stitch::WorkerInfo{"y", WorkerId(2), 1}));
  EXPECT_EQ(place("", none, "1:8"), (stitch::WorkerInfo{"worker2", WorkerId(2), 1}));
  EXPECT_EQ(place("y", 7, "1:8"), (stitch::WorkerInfo{"y", WorkerId(7), 1}));
  const auto refusal = [&](const std::string& name, std::int64_t rank, const WorldSize& size) {
    return std::string(error_of([&] { static_cast<void>(place(name, rank, size)); }).what());
  };
  EXPECT_EQ(refusal("y", 1, 2),
            "worker \"y\" is one too many: the world of 2 at here is full; its workers are "
            "worker0, x");
  EXPECT_EQ(refusal("worker1", 1, 3),
            "worker \"worker1\" expects a world of 3; the one that runs at here is of 2");
  EXPECT_EQ(refusal("worker1", 0, 2),
            "worker \"worker1\" has rank 0; in the world at here it was rank 1");
  EXPECT_EQ(refusal("y", 0, "1:8"),
            "rank 0 is taken twice: by worker \"worker0\" and worker \"y\"");
}

TEST(Admission, TakesWhoFits) {
  std::vector<MemberCard> live;
  for (std::uint32_t i = 0; i < 3; ++i)
    live.push_back(life_of("worker" + std::to_string(i), i).card);
  live[2].record = "rubbish of another is no reason";
  const auto card = [](const std::string& name, std::uint32_t id) {
    MemberRecord record;
    record.size = 3;
    record.name = name;
    return MemberCard{{name, WorkerId(id), 9}, {}, record.encode()};
  };
  const auto refusal = [&](const MemberCard& joiner, const WorldSize& size) {
    const auto error = stitch::rpc::objection_to(joiner, live, size);
    return error ? std::string(error->what()) : "";
  };
  EXPECT_EQ(refusal(card("worker1", 1), 3), "");
  EXPECT_EQ(refusal(card("worker1", 1), "1:3"), "");
  EXPECT_EQ(refusal(card("x", 3), "1:4"), "");
  EXPECT_EQ(refusal(card("x", 3), "1:3"),
            "worker \"x\" is one too many: the world of 1:3 has 3 workers: worker0, worker1, "
            "worker2");
  EXPECT_EQ(refusal(card("x", 1), "1:9"),
            "rank 1 is taken twice: by worker \"worker1\" and worker \"x\"");
  EXPECT_EQ(refusal(card("worker1", 4), "1:9"),
            "worker name \"worker1\" is taken twice: by rank 1 and rank 4");
  auto rubbish = card("x", 3);
  rubbish.record = "rubbish";
  EXPECT_NE(refusal(rubbish, "1:9"), "");
}

TEST(Admission, LooksAtDeviceMapsAlsoWhereWorkersMayStillCome) {
  const auto card = [](const std::string& name, std::uint32_t id, int devices,
                       const std::map<std::string, std::map<std::string, std::string>>& maps) {
    MemberRecord record;
    record.size = 3;
    record.name = name;
    record.devices = {devices, stitch::rpc::parse_device_maps(maps)};
    return MemberCard{{name, WorkerId(id), 9}, {}, record.encode()};
  };
  const std::vector<MemberCard> live{card("a", 0, 2, {{"b", {{"cuda:1", "cuda:2"}}}})};
  const auto refusal = [&](const MemberCard& joiner, const WorldSize& size) {
    const auto error = stitch::rpc::objection_to(joiner, live, size);
    return error ? std::string(error->what()) : "";
  };
  for (const WorldSize& size : {WorldSize("1:4"), WorldSize(3)}) {
    EXPECT_EQ(refusal(card("b", 1, 3, {{"c", {{"cuda:0", "cuda:9"}}}}), size), "");
    EXPECT_EQ(refusal(card("b", 1, 2, {}), size),
              "device_maps of worker \"a\" for worker \"b\" (cuda:1=cuda:2) name cuda:2, which "
              "worker \"b\" does not have: it has 2 CUDA devices");
    EXPECT_EQ(refusal(card("c", 2, 1, {{"a", {{"cuda:0", "cuda:2"}}}}), size),
              "device_maps of worker \"c\" for worker \"a\" (cuda:0=cuda:2) name cuda:2, which "
              "worker \"a\" does not have: it has 2 CUDA devices");
  }
}

TEST(WorldRecord, TravelsAndRubbishIsRefused) {
  WorldRecord record{77, {life_of("worker0", 0), life_of("worker1", 1, LifeState::dead)}};
  record.lives[1].verdict = "it was killed";
  record.failure = "it failed";
  record.failed_for = {"token of worker1"};
  const std::string text = record.encode();
  const auto read = WorldRecord::decode(text);
  EXPECT_EQ(read.encode(), text);
  EXPECT_EQ(read.number, 77U);
  EXPECT_EQ(read.lives[0], record.lives[0]);
  EXPECT_EQ(read.lives[1].card, (MemberCard{{"worker1", WorkerId(1), 1}, {}, {}}));
  EXPECT_EQ(read.lives[1].verdict, "it was killed");
  EXPECT_EQ(read.find("token of worker0")->info.name, "worker0");
  EXPECT_EQ(read.find("token of worker1"), nullptr);
  EXPECT_FALSE(read.failure_of("token of worker0"));
  EXPECT_STREQ(read.failure_of("token of worker1")->what(), "it failed");
  for (std::size_t cut = 0; cut < text.size(); ++cut)
    EXPECT_THROW(static_cast<void>(WorldRecord::decode(text.substr(0, cut))), Error) << cut;
  EXPECT_THROW(static_cast<void>(WorldRecord::decode(text + "x")), Error);
  record.lives[1].card.info.name = "worker0";
  EXPECT_THROW(static_cast<void>(record.encode()), Error) << "a reader refuses it";
}

TEST(WorldRecord, OfAllNamesThatAWorldCanHaveFitsIntoAStore) {
  constexpr std::size_t kName = 90;
  WorldRecord record;
  for (std::uint32_t id = 0; id < 65'536; ++id) {
    std::string name = "worker" + std::to_string(id);
    name.resize(kName, '-');
    record.lives.push_back({{{name, WorkerId(id), 1}, {}, {}}, LifeState::dead, "it was killed"});
  }
  EXPECT_LE(record.encode().size(), stitch::transport::Store::kMaxValueBytes);
}

}  // namespace
}  // namespace founding_test
