// How long a poller's threads busy-poll, when they yield and migrate: with a clock of the test's.
#include "stitch/transport/stream/spin_policy.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace stitch::transport::spin_policy_test {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::seconds;
using TimePoint = SpinPolicy::TimePoint;
using Duration = SpinPolicy::Duration;

class SpinPolicyTest : public ::testing::Test {
 protected:
  // A sleep of `length` that traffic ends.
  void sleep_for(Duration length) {
    policy.went_idle(now);
    now += length;
    policy.woken_by_traffic(now);
  }
  // A yield of about `length` that ends when the coin toss of the policy says `migrate`: the bit of
  // the clock worth 32 ns decides.
  SpinPolicy::AfterYield yield_for(Duration length, bool coin_says_migrate = true,
                                   bool may_migrate = true) {
    const TimePoint begin = now;
    now += length;
    while ((now.time_since_epoch().count() / 32) % 2 != (coin_says_migrate ? 1 : 0))
      now += nanoseconds(32);
    return policy.yielded(begin, now, may_migrate);
  }
  // Yields that run another thread, one after the other, until the thread is told to migrate.
  // Returns how long that took; `limit` when it is not told to.
  Duration time_until_migration(Duration limit) {
    const TimePoint begin = now;
    while (now - begin < limit) {
      if (yield_for(kSwitch).migrate) return now - begin;
    }
    return limit;
  }

  static constexpr microseconds kSwitch{20};  // a yield that runs another thread for a moment
  static constexpr nanoseconds kAlone{500};   // one that runs no other thread

  SpinPolicy policy;
  TimePoint now{seconds(1000)};
};

TEST_F(SpinPolicyTest, StartsWithTheLongestInterval) {
  EXPECT_EQ(policy.interval(), SpinPolicy::kMaxInterval);
}

TEST_F(SpinPolicyTest, LongSleepsHalveTheIntervalDownToItsMinimum) {
  sleep_for(milliseconds(10));
  EXPECT_EQ(policy.interval(), SpinPolicy::kMaxInterval / 2);
  sleep_for(milliseconds(10));
  EXPECT_EQ(policy.interval(), SpinPolicy::kMaxInterval / 4);
  for (int i = 0; i < 20; ++i) sleep_for(milliseconds(10));
  EXPECT_EQ(policy.interval(), SpinPolicy::kMinInterval);
}

TEST_F(SpinPolicyTest, ShortSleepsDoubleTheIntervalUpToItsMaximum) {
  for (int i = 0; i < 20; ++i) sleep_for(milliseconds(10));
  sleep_for(microseconds(20));
  EXPECT_EQ(policy.interval(), 2 * SpinPolicy::kMinInterval);
  for (int i = 0; i < 20; ++i) sleep_for(microseconds(20));
  EXPECT_EQ(policy.interval(), SpinPolicy::kMaxInterval);
}

TEST_F(SpinPolicyTest, ASleepOfExactlyTheLimitIsShort) {
  sleep_for(milliseconds(10));
  sleep_for(SpinPolicy::kShortSleep);
  EXPECT_EQ(policy.interval(), SpinPolicy::kMaxInterval);
  sleep_for(SpinPolicy::kShortSleep + nanoseconds(1));
  EXPECT_EQ(policy.interval(), SpinPolicy::kMaxInterval / 2);
}

TEST_F(SpinPolicyTest, OnlyALongYieldIsContended) {
  EXPECT_FALSE(yield_for(SpinPolicy::kContendedYield - microseconds(1)).contended);
  EXPECT_EQ(policy.interval(), SpinPolicy::kMaxInterval);
  EXPECT_TRUE(yield_for(SpinPolicy::kContendedYield + microseconds(1)).contended);
  EXPECT_EQ(policy.interval(), SpinPolicy::kMaxInterval / 2);
}

TEST_F(SpinPolicyTest, ContendedYieldsHalveTheIntervalDownToItsMinimum) {
  for (int i = 0; i < 20; ++i) yield_for(milliseconds(1));
  EXPECT_EQ(policy.interval(), SpinPolicy::kMinInterval);
}

TEST_F(SpinPolicyTest, HelpsLastLongerWhenAnswersComeSoonAfterThem) {
  Duration last_interval{0};
  const auto give_up = [&](Duration sleep) {
    const SpinPolicy::Help help = policy.next_help();
    last_interval = help.interval;
    policy.went_idle(now);
    policy.gave_up(help, true);
    now += sleep;
    policy.woken_by_traffic(now);
  };
  Duration wanted = SpinPolicy::kHelpInterval;
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(policy.next_help().at_least, wanted) << i;
    give_up(SpinPolicy::kMaxHelp - nanoseconds(1));
    wanted = std::min<Duration>(wanted * 2, SpinPolicy::kMaxHelp);
  }
  sleep_for(SpinPolicy::kMaxHelp);
  EXPECT_EQ(policy.next_help().at_least, SpinPolicy::kMaxHelp) << "no help had ended";
  for (int i = 0; i < 10; ++i) {
    give_up(SpinPolicy::kMaxHelp);
    wanted = std::max<Duration>(wanted / 2, SpinPolicy::kHelpInterval);
    EXPECT_EQ(policy.next_help().at_least, wanted) << i;
  }
  for (int i = 0; i < 10; ++i) give_up(microseconds(1));
  EXPECT_TRUE(yield_for(SpinPolicy::kContendedYield + microseconds(1)).contended);
  for (int i = 0; i < SpinPolicy::kShortHelps; ++i) {
    give_up(microseconds(1));
    EXPECT_EQ(last_interval, SpinPolicy::kMinInterval) << i;
  }
  EXPECT_EQ(policy.next_help().interval, SpinPolicy::kHelpInterval);
  EXPECT_EQ(policy.next_help().at_least, SpinPolicy::kHelpInterval) << "short ones do not count";
}

TEST_F(SpinPolicyTest, HelpsThatBringWorkDoNotLastLonger) {
  for (int i = 0; i < 10; ++i) {
    policy.went_idle(now);
    policy.gave_up(policy.next_help(), i < 9);
    now += microseconds(1);
    policy.woken_by_traffic(now);
  }
  EXPECT_EQ(policy.next_help().at_least, SpinPolicy::kHelpInterval);
}

TEST_F(SpinPolicyTest, HelpsAreShortForAWhileAfterAContendedYield) {
  EXPECT_EQ(policy.next_help().interval, SpinPolicy::kHelpInterval);
  yield_for(milliseconds(1));
  for (int i = 0; i < SpinPolicy::kShortHelps; ++i)
    EXPECT_EQ(policy.next_help().interval, SpinPolicy::kMinInterval) << i;
  EXPECT_EQ(policy.next_help().interval, SpinPolicy::kHelpInterval);
}

TEST_F(SpinPolicyTest, YieldsThatRunNoOtherThreadNeverMigrate) {
  for (int i = 0; i < 1000; ++i) {
    const auto after = yield_for(kAlone);
    EXPECT_FALSE(after.migrate);
    EXPECT_FALSE(after.contended);
  }
}

TEST_F(SpinPolicyTest, MigratesAfterSeveralSwitchedYieldsInARow) {
  for (int i = 1; i < SpinPolicy::kContendedYields; ++i) EXPECT_FALSE(yield_for(kSwitch).migrate);
  EXPECT_TRUE(yield_for(kSwitch).migrate);
}

TEST_F(SpinPolicyTest, AYieldThatRanNoOtherThreadStartsTheCountAnew) {
  for (int round = 0; round < 100; ++round) {
    for (int i = 1; i < SpinPolicy::kContendedYields; ++i) EXPECT_FALSE(yield_for(kSwitch).migrate);
    EXPECT_FALSE(yield_for(kAlone).migrate);
  }
}

TEST_F(SpinPolicyTest, ThreadsOfUsersAreNotMigrated) {
  for (int i = 0; i < 1000; ++i) EXPECT_FALSE(yield_for(kSwitch, true, false).migrate);
  // What they saw counts for the poller's own thread, which migrates on its next such yield.
  EXPECT_TRUE(yield_for(kSwitch).migrate);
}

TEST_F(SpinPolicyTest, OneOfTwoThreadsStaysAndDecidesAgainSoon) {
  for (int i = 1; i < SpinPolicy::kContendedYields; ++i) yield_for(kSwitch);
  EXPECT_FALSE(yield_for(kSwitch, false).migrate) << "the coin says stay";
  const TimePoint stayed = now;
  while (now + kSwitch + microseconds(1) < stayed + SpinPolicy::kStayBackoff)
    EXPECT_FALSE(yield_for(kSwitch).migrate);
  EXPECT_LE(time_until_migration(milliseconds(1)), 3 * kSwitch);
}

TEST_F(SpinPolicyTest, MigrationsBackOffExponentiallyUpToAMaximum) {
  ASSERT_LT(time_until_migration(milliseconds(1)), milliseconds(1));
  Duration expected = SpinPolicy::kMinMigrationBackoff;
  for (int i = 0; i < 14; ++i) {
    const Duration took = time_until_migration(seconds(3));
    EXPECT_GE(took, expected) << i;
    EXPECT_LT(took, expected + 2 * kSwitch) << i;
    expected = std::min<Duration>(2 * expected, SpinPolicy::kMaxMigrationBackoff);
  }
  EXPECT_EQ(expected, SpinPolicy::kMaxMigrationBackoff);
}

TEST_F(SpinPolicyTest, AnUncontendedCpuResetsTheBackOff) {
  for (int i = 0; i < 8; ++i) static_cast<void>(time_until_migration(seconds(3)));
  // The last migration helped: no other thread runs for longer than the back-off was.
  for (const TimePoint end = now + seconds(2); now < end;) yield_for(kAlone);
  ASSERT_LT(time_until_migration(milliseconds(1)), milliseconds(1));
  const Duration took = time_until_migration(seconds(3));
  EXPECT_GE(took, SpinPolicy::kMinMigrationBackoff);
  EXPECT_LT(took, SpinPolicy::kMinMigrationBackoff + 2 * kSwitch);
}

TEST_F(SpinPolicyTest, AShortCalmDoesNotResetTheBackOff) {
  for (int i = 0; i < 8; ++i) static_cast<void>(time_until_migration(seconds(3)));
  for (const TimePoint end = now + SpinPolicy::kUncontendedAfter / 2; now < end;) yield_for(kAlone);
  EXPECT_GT(time_until_migration(seconds(3)), 50 * SpinPolicy::kMinMigrationBackoff);
}

TEST_F(SpinPolicyTest, YieldsNowAndThenWhileBusy) {
  const TimePoint begin = now;
  EXPECT_TRUE(policy.busy_yield_due(begin, begin + nanoseconds(1))) << "the first busy round";
  policy.yielded_while_busy(begin, begin + kAlone);
  EXPECT_FALSE(policy.busy_yield_due(begin, begin + SpinPolicy::kBusyYieldInterval));
  EXPECT_TRUE(
      policy.busy_yield_due(begin, begin + SpinPolicy::kBusyYieldInterval + nanoseconds(1)));
}

TEST_F(SpinPolicyTest, YieldsRarelyWhileBusyOnceThatHasCostMuch) {
  const TimePoint begin = now;
  policy.yielded_while_busy(begin, begin + SpinPolicy::kContendedYield + nanoseconds(1));
  EXPECT_FALSE(policy.busy_yield_due(begin, begin + SpinPolicy::kContendedBusyYieldInterval));
  EXPECT_TRUE(policy.busy_yield_due(
      begin, begin + SpinPolicy::kContendedBusyYieldInterval + nanoseconds(1)));
  policy.yielded_while_busy(begin, begin + kAlone);
  EXPECT_TRUE(
      policy.busy_yield_due(begin, begin + SpinPolicy::kBusyYieldInterval + nanoseconds(1)));
}

}  // namespace
}  // namespace stitch::transport::spin_policy_test
