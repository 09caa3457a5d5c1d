// How workers meet in a store, without the workers: founding a world, finding one that runs.
#include "stitch/rpc/world/rendezvous.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "stitch/rpc/world/admission.h"
#include "stitch/rpc/world/running_world.h"
#include "tests/rpc/founding_fixture.h"
#include "tests/support/contains.h"
#include "tests/support/error_of.h"

namespace rendezvous_test {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;
using stitch::Error;
using stitch::ErrorCode;
using stitch::Options;
using stitch::WorkerId;
using stitch::rpc::MemberCard;
using stitch::rpc::MemberRecord;
using stitch::rpc::Rendezvous;
using stitch::rpc::RunningWorld;
using stitch::rpc::WorldRecord;
using stitch::testing::contains;
using stitch::testing::error_of;
using stitch::testing::has_text;
using stitch::testing::record_of;
namespace world_key = stitch::rpc::world_key;

// The record of a world of "worker0", "worker1", .. whose epochs are all 1.
WorldRecord world_of(int workers, stitch::WorldSize size) {
  WorldRecord record;
  record.number = 77;
  record.size = size;
  for (int i = 0; i < workers; ++i) {
    MemberRecord member;
    member.name = "worker" + std::to_string(i);
    record.entries.push_back(
        {MemberCard{{member.name, WorkerId(static_cast<std::uint32_t>(i)), 1}, {}, member.encode()},
         true});
  }
  return record;
}

class Meeting : public stitch::testing::Founding {
 protected:
  ~Meeting() override {
    keeping_ = false;
    if (keeper_.joinable()) keeper_.join();
  }

  RunningWorld running(const Options& options, std::chrono::milliseconds answer_timeout = 10s) {
    return RunningWorld(options, store(), steady_clock::now() + 20s, answer_timeout);
  }
  // A world with this record runs, as far as the store goes.
  void keep(const WorldRecord& record) {
    store().set(world_key::kWorld, record.encode());
    keeping_ = true;
    keeper_ = std::thread([this] {
      while (keeping_) {
        if (const auto ring = store().try_get(world_key::kRing))
          store().set(world_key::kRung, *ring);
        std::this_thread::sleep_for(5ms);
      }
    });
  }

 private:
  std::atomic<bool> keeping_{false};
  std::thread keeper_;
};
INSTANTIATE_TEST_SUITE_P(Stores, Meeting, ::testing::Values("hash"),
                         [](const auto& info) { return info.param; });

TEST_P(Meeting, FoundersAgreeAndLeaveTheRecordOfTheirWorld) {
  const auto records = found_together(
      {{.name = "b", .rank = 1, .world_size = 2}, {.name = "a", .rank = 0, .world_size = 2}});
  for (const auto& record : records) {
    ASSERT_EQ(record.entries.size(), 2u);
    EXPECT_EQ(record.entries[0].card.info.name, "a");
    EXPECT_EQ(record.entries[0].card.addresses, std::vector<std::string>{"here:a"});
    EXPECT_EQ(record.entries[1].card.info.id, WorkerId(1));
    EXPECT_EQ(record.number, records[0].number);
  }
  EXPECT_EQ(store().try_get(world_key::kWorld), records[0].encode());
  for (const char* key : {"arrived", "number", "recorded", "member/0", "card/1"})
    EXPECT_EQ(store().try_get(std::string("founding/0/") + key), std::nullopt) << key;
}

TEST_P(Meeting, AWorldOfWhichNoMemberAnswersIsDead) {
  const auto first = found_together({{.name = "a", .rank = 0, .world_size = 1}});
  const Options again{.name = "a", .rank = 0, .world_size = 1};
  const auto began = steady_clock::now();
  EXPECT_FALSE(running(again, 100ms).find());
  EXPECT_LT(steady_clock::now() - began, 5s);
  EXPECT_EQ(store().try_get(world_key::kWorld), "");
  const auto second = found_together({again});  // the old founding's keys are not in the way
  EXPECT_NE(second[0].number, first[0].number);
  EXPECT_EQ(second[0].entries[0].card.info.epoch, 2u);
}

TEST_P(Meeting, ARestartedWorkerGetsItsIdAndAHigherEpoch) {
  keep(world_of(3, 3));
  const Options options{.name = "worker1", .rank = 1, .world_size = 3};
  auto world = running(options);
  const auto record = world.find();
  ASSERT_TRUE(record);
  EXPECT_EQ(record->number, 77u);
  const auto self = world.claim(*record);
  EXPECT_EQ(self.id, WorkerId(1));
  EXPECT_EQ(self.epoch, 2u);  // though this store has not counted the first life
}

TEST_P(Meeting, WorkersThatStartAtOnceGetDifferentIds) {
  keep(world_of(2, "2:9"));
  std::vector<stitch::WorkerInfo> infos(4);
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < infos.size(); ++i) {
      threads.emplace_back([&, i] {
        // Two of them have no names.
        const Options options{.name = i < 2 ? "new" + std::to_string(i) : "", .world_size = "2:9"};
        auto world = running(options);
        infos[i] = world.claim(world.find().value());
      });
    }
  }
  std::set<WorkerId> ids;
  for (std::size_t i = 0; i < infos.size(); ++i) {
    EXPECT_GE(infos[i].id, WorkerId(2));
    EXPECT_TRUE(ids.insert(infos[i].id).second) << infos[i].id;
    EXPECT_EQ(infos[i].name,
              i < 2 ? "new" + std::to_string(i) : "worker" + std::to_string(infos[i].id.value()));
  }
}

TEST_P(Meeting, AWorkerWithoutAPlaceInTheWorldIsTold) {
  auto record = world_of(2, 2);
  keep(record);
  const auto refusal = [&](const Options& options) {
    const Error error = error_of([&] { static_cast<void>(running(options).find()); });
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return std::string(error.what());
  };
  EXPECT_TRUE(contains(refusal({.name = "x", .rank = 1, .world_size = 2}),
                       "worker \"x\" is one too many: the world of 2 at "));
  EXPECT_TRUE(contains(refusal({.name = "worker1", .rank = 1, .world_size = 3}),
                       "worker \"worker1\" expects a world of 3; the one that runs at "));
  EXPECT_TRUE(contains(refusal({.name = "worker1", .rank = 0, .world_size = 2}),
                       "worker \"worker1\" has rank 0; in the world at "));
  record.size = "1:2";
  store().set(world_key::kWorld, record.encode());
  const std::string full = refusal({.name = "x", .world_size = "1:2"});
  EXPECT_TRUE(contains(full, "has 2 workers: worker0, worker1")) << full;
  // The place of a dead worker is free, and a worker does not take its own twice.
  record.entries[1].live = false;
  store().set(world_key::kWorld, record.encode());
  EXPECT_TRUE(running(Options{.name = "x", .world_size = "1:2"}).find());
  EXPECT_TRUE(running(Options{.name = "worker0", .world_size = "1:2"}).find());
  const Options taken{.name = "x", .rank = 0, .world_size = "1:2"};
  auto world = running(taken);
  const auto found = world.find();
  EXPECT_TRUE(has_text(error_of([&] { static_cast<void>(world.claim(*found)); }),
                       ErrorCode::already_exists,
                       "rank 0 is taken twice: by worker \"worker0\" and worker \"x\""));
}

// Its other members live, and the next keeper knows whether there is a place now.
TEST_P(Meeting, AFullWorldWhoseKeeperHasDiedIsNotBuried) {
  auto record = world_of(2, "1:2");
  const Options late{.name = "x", .world_size = "1:2"};
  int asked = 0;
  RunningWorld::Reach reach;
  reach.join = [](const WorldRecord&) -> bool {
    ADD_FAILURE() << "it has no place there";
    return false;
  };
  reach.lives = [&](const WorldRecord&) { return ++asked > 0; };
  store().set(world_key::kWorld, record.encode());
  const Error error = error_of([&] { static_cast<void>(running(late, 50ms).find(reach)); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
  EXPECT_TRUE(contains(error.what(), "worker \"x\" is one too many")) << error.what();
  EXPECT_EQ(asked, 2) << "the next keeper had no time";
  EXPECT_EQ(store().try_get(world_key::kWorld), record.encode());
  reach.lives = [](const WorldRecord&) { return false; };
  EXPECT_FALSE(running(late, 50ms).find(reach)) << "none of its members lives";
  store().set(world_key::kWorld, record.encode());
  reach.lives = [&](const WorldRecord&) {
    record.entries[0].live = false;
    keep(record);
    return true;
  };
  const auto found = running(late, 2s).find(reach);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->live_names(), std::vector<std::string>{"worker1"});
}

TEST_P(Meeting, AnElasticWorldIsFoundedByTheFirstToArrive) {
  const auto records = found_together({{.name = "a", .world_size = "3:8"},
                                       {.name = "", .world_size = "3:8"},
                                       {.name = "c", .rank = 5, .world_size = "3:8"}});
  std::set<std::uint32_t> ids;
  for (const auto& entry : records[0].entries) ids.insert(entry.card.info.id.value());
  EXPECT_EQ(ids, (std::set<std::uint32_t>{0, 1, 5}));
  EXPECT_EQ(records[0].find("c")->card.info.id, WorkerId(5));
  ASSERT_EQ(records[0].encode(), records[1].encode());
  const Options late{.name = "d", .world_size = "3:8"};
  Rendezvous rendezvous(late, store(), false, steady_clock::now() + 20s);
  EXPECT_TRUE(running(late).is_recorded());
}

TEST_P(Meeting, AWorkerThatWaitsForOthersNoticesAWorldThatComesBack) {
  const Options options{.name = "worker0", .rank = 0, .world_size = 3};
  Rendezvous rendezvous(options, store(), false, steady_clock::now() + 20s);
  auto world = running(options);
  std::jthread comes_back([&] {
    std::this_thread::sleep_for(150ms);
    store().set(world_key::kWorld, world_of(3, 3).encode());
  });
  EXPECT_FALSE(rendezvous.meet(record_of(options), [&] { return world.is_recorded(); }));
}

TEST_P(Meeting, TheNewHostOfAnElasticWorldsStoreWaitsForTheFormerWorld) {
  const Options options{.name = "worker0", .rank = 0, .world_size = "1:3"};
  auto host = running(options);
  const auto began = steady_clock::now();
  host.await_former_world(true);  // none comes
  EXPECT_GE(steady_clock::now() - began, RunningWorld::kReturnTime);
  running(options).await_former_world(false);  // the host has said so
  store().erase(world_key::kOpen);
  store().set(world_key::kWorld, world_of(1, "1:3").encode());
  host.await_former_world(true);
  EXPECT_TRUE(host.is_recorded());
}

TEST(Admission, TakesWhoFits) {
  const auto world = world_of(3, "1:3");
  std::vector<MemberCard> live;
  for (const auto& entry : world.entries) live.push_back(entry.card);
  const auto card = [](const std::string& name, std::uint32_t id) {
    MemberRecord record;
    record.name = name;
    return MemberCard{{name, WorkerId(id), 9}, {}, record.encode()};
  };
  const auto refusal = [&](const MemberCard& joiner, const stitch::WorldSize& size) {
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
    record.name = name;
    record.devices = {devices, stitch::rpc::parse_device_maps(maps)};
    return MemberCard{{name, WorkerId(id), 9}, {}, record.encode()};
  };
  const std::vector<MemberCard> live{card("a", 0, 2, {{"b", {{"cuda:1", "cuda:2"}}}})};
  const auto refusal = [&](const MemberCard& joiner, const stitch::WorldSize& size) {
    const auto error = stitch::rpc::objection_to(joiner, live, size);
    return error ? std::string(error->what()) : "";
  };
  for (const stitch::WorldSize& size : {stitch::WorldSize("1:4"), stitch::WorldSize(3)}) {
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
  auto record = world_of(3, "2:8");
  record.entries[1].live = false;
  record.entries[2].card.addresses = {"shm:x", "tcp://127.0.0.1:1"};
  const std::string text = record.encode();
  const auto read = WorldRecord::decode(text);
  EXPECT_EQ(read.encode(), text);
  EXPECT_EQ(read.number, 77u);
  EXPECT_EQ(read.size, record.size);
  EXPECT_EQ(read.live_names(), (std::vector<std::string>{"worker0", "worker2"}));
  EXPECT_EQ(read.entries[2].card.addresses, record.entries[2].card.addresses);
  for (std::size_t cut = 0; cut < text.size(); ++cut)
    EXPECT_THROW(static_cast<void>(WorldRecord::decode(text.substr(0, cut))), Error) << cut;
  EXPECT_THROW(static_cast<void>(WorldRecord::decode(text + "x")), Error);
  record.entries[1].card.info.name = "worker0";
  EXPECT_THROW(static_cast<void>(WorldRecord::decode(record.encode())), Error);
}

}  // namespace
}  // namespace rendezvous_test
