// Workers that die while they found a world: those that start again found it without their former
// lives. Without processes: what a worker has claimed ends with the test's object.
#include "stitch/rpc/world/founding.h"
#include "tests/rpc/founding_fixture.h"
#include "tests/support/world_test.h"

namespace founding_deaths_test {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;
using stitch::ErrorCode;
using stitch::Options;
using stitch::rpc::WorldRecord;
using stitch::testing::eventually;
namespace world_key = stitch::rpc::world_key;

class FoundingDeaths : public stitch::testing::Founding {
 protected:
  // All have founded one world, in less than the time limit of a founding.
  void expect_quick(const std::vector<Place>& places) {
    expect_one_world(places);
    EXPECT_LT(steady_clock::now() - began_, 10s);
  }
  [[nodiscard]] bool waiting(std::size_t count) const {
    return store->claims(world_key::kMember, count, 20s).size() == count;
  }

 private:
  const steady_clock::time_point began_ = steady_clock::now();
};

TEST_F(FoundingDeaths, AWorkerThatDiedBeforeIsNotThere) {
  claim(a).reset();
  claim({.name = "b", .rank = 1, .world_size = 4}).reset();
  store->claim(world_key::kKeeper, "a").claim.reset();
  expect_quick(found_together({a, b}));
}

// The end of its claim is on the way.
TEST_F(FoundingDeaths, ARestartedWorkerIsNoDuplicateOfItsFormerLife) {
  auto former = claim(b);
  std::vector<Place> places(2);
  std::jthread comes_back([&] { places[1] = found(b); });
  EXPECT_TRUE(waiting(2));
  std::jthread dies([&] {
    EXPECT_TRUE(waiting(3));
    std::this_thread::sleep_for(300ms);
    former.reset();
  });
  places[0] = found(a);
  comes_back.join();
  expect_quick(places);
}

TEST_F(FoundingDeaths, TheLeaderDiesBeforeItHasWrittenTheWorld) {
  std::vector<Place> places(2);
  auto former = claim(a);
  auto leads = store->claim(world_key::kKeeper, "a").claim;
  std::jthread other([&] { places[1] = found(b); });
  EXPECT_TRUE(waiting(2));
  former.reset();
  leads.reset();
  places[0] = found(a);
  other.join();
  expect_quick(places);
}

TEST_F(FoundingDeaths, AnotherLeadsAnElasticWorldWhoseLeaderDies) {
  const Options options{.name = "x", .world_size = "2:4"};
  const Options other{.name = "y", .world_size = "2:4"};
  auto leads = store->claim(world_key::kLeader, "former").claim;
  std::jthread dies([&] {
    EXPECT_TRUE(waiting(2));
    leads.reset();
  });
  expect_quick(found_together({options, other}));
}

// The others are members of its world, and will notice.
TEST_F(FoundingDeaths, TheLeaderDiesRightAfterItHasWrittenTheWorld) {
  std::vector<Place> places(2);
  {
    std::jthread other([&] { places[1] = found(b); });
    places[0] = found(a);
    places[0].keeper.reset();
  }
  expect_quick(places);
}

// Its world goes on: the others are told of it, or it is told by the keeper of its death.
TEST_F(FoundingDeaths, AFounderDiesBeforeItHasReadTheWorld) {
  auto former = claim(b);
  const auto first = found(a);
  EXPECT_EQ(first.world.lives.size(), 2U);
  former.reset();
  // Its next life is no founder.
  std::jthread answers([&] {
    const auto claims = store->claims(world_key::kMember, 1, 20s);
    const std::string token = claims.begin()->first.substr(std::string(world_key::kMember).size());
    store->set(world_key::kAnswer + token,
               WorldRecord{first.world.number, {}, "asked the keeper", {token}}.encode());
  });
  const auto error = stitch::testing::error_of([&] { static_cast<void>(found(b)); });
  EXPECT_STREQ(error.what(), "asked the keeper");
}

// The leader of a founding that failed has died before it took that away.
TEST_F(FoundingDeaths, AFailureOfOthersIsIgnored) {
  store->set(world_key::kWorld, WorldRecord{0, {}, "it failed", {"another token"}}.encode());
  expect_quick(found_together({a, b}));
}

}  // namespace
}  // namespace founding_deaths_test
