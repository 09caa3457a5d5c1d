// When threads block instead of polling.
#include "stitch/transport/polling/core_demand.h"

#include "tests/support/forked_child.h"
#include "tests/support/plain_test.h"

namespace stitch::transport::core_demand_test {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

std::optional<bool> seen;
int looks = 0;
std::optional<bool> look() noexcept {
  ++looks;
  return seen;
}

class CoreDemands : public ::testing::Test {
 protected:
  CoreDemands() {
    seen = false;
    looks = 0;
  }
  // At the next time that it looks.
  bool wanted_next() {
    now += CoreDemand::kProbeInterval;
    return demand.wanted(now);
  }
  // To a thread that computes.
  void lose_core() {
    demand.lost_core(now);
    demand.lost_core(now);
    looks -= 1;
  }
  CoreDemand demand{&look};
  CoreDemand::Clock::time_point now{std::chrono::hours(1)};
};

TEST_F(CoreDemands, DoesNotLookWhileNoThreadLosesItsCore) {
  seen = true;
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(wanted_next());
  EXPECT_EQ(looks, 0);
}

TEST_F(CoreDemands, AThreadThatLostItsCoreLooksAtOnce) {
  lose_core();
  EXPECT_FALSE(demand.wanted(now)) << "others have gone";
  seen = true;
  lose_core();
  EXPECT_TRUE(demand.wanted(now));
  EXPECT_TRUE(demand.were_wanted());
}

TEST_F(CoreDemands, APassingThreadIsNone) {
  seen = true;
  for (int i = 0; i < 10; ++i) {
    demand.lost_core(now);
    EXPECT_FALSE(demand.wanted(now));
    now += CoreDemand::kPassing;
  }
}

TEST_F(CoreDemands, LooksOnceAMillisecondUntilTheCoresAreFree) {
  seen = true;
  lose_core();
  for (int i = 0; i < 3'000; ++i) EXPECT_TRUE(demand.wanted(now + microseconds(i)));
  EXPECT_EQ(looks, 3);
  now += microseconds(2'500);
  seen = false;
  EXPECT_TRUE(demand.wanted(now + CoreDemand::kProbeInterval / 4));
  EXPECT_FALSE(wanted_next());
  // As if nothing had been.
  seen = true;
  lose_core();
  EXPECT_TRUE(demand.wanted(now + CoreDemand::kMinBlock - microseconds(1)));
  EXPECT_FALSE(demand.wanted(now + CoreDemand::kMinBlock + CoreDemand::kProbeInterval));
}

TEST_F(CoreDemands, CoresAreWantedForLongerWhileLossesFollowEachOther) {
  for (const auto view : {std::optional<bool>(true), std::optional<bool>()}) {
    seen = view;
    CoreDemand::Clock::duration longest{};
    for (int i = 0; i < 12; ++i) {
      i == 0 ? lose_core() : demand.lost_core(now);
      const auto begin = now;
      while (demand.wanted(now)) now += microseconds(100);
      EXPECT_GE(now - begin, longest) << i;
      longest = now - begin;
      if (i == 0) EXPECT_LE(longest, CoreDemand::kMinBlock + CoreDemand::kProbeInterval);
    }
    EXPECT_GE(longest, CoreDemand::kMaxBlock);
    EXPECT_LE(longest, CoreDemand::kMaxBlock + CoreDemand::kProbeInterval);
    now += 2 * CoreDemand::kMaxBlock;  // of calm
  }
}

std::atomic<bool> looking{false};
std::atomic<bool> look_ends{false};

TEST_F(CoreDemands, AChildLooksAlthoughAThreadOfItsParentDidAtTheFork) {
  CoreDemand held(+[]() noexcept -> std::optional<bool> {
    looking = true;
    while (!look_ends) std::this_thread::yield();
    return true;
  });
  std::jthread other([&] { held.lost_core(now); });
  while (!looking) std::this_thread::yield();
  stitch::testing::ForkedChild child([&] {
    look_ends = true;
    held.lost_core(now);
    held.lost_core(now);
    return held.wanted(now) ? 0 : 2;
  });
  look_ends = true;
  EXPECT_EQ(child.wait(), 0);
}

}  // namespace
}  // namespace stitch::transport::core_demand_test
