#include "stitch/rpc/message/time_left.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <limits>

#include "stitch/base/kernel_clock.h"

namespace stitch::rpc::time_left_test {
namespace {

using namespace std::chrono_literals;
using std::chrono::nanoseconds;
using Clock = std::chrono::steady_clock;
constexpr auto kMax = std::numeric_limits<std::int64_t>::max();
constexpr auto kMin = std::numeric_limits<std::int64_t>::min();

Clock::time_point at(nanoseconds time) { return Clock::time_point(time); }
// A request with `left`, written when the caller's clock showed `written`.
TimeLeft request(nanoseconds left, nanoseconds written) {
  return {left.count(), (written + left).count()};
}

TEST(TimeLeft, OneClockTellsTheDeadline) {
  if (!base::has_kernel_clock()) GTEST_SKIP() << "this process has a time namespace of its own";
  EXPECT_EQ(due_here(at(1000s), request(100ms, 1000s), true), at(1000s + 100ms));
  EXPECT_EQ(due_here(at(1000s), request(100ms, 1000s - 70ms), true), at(1000s + 30ms));
  EXPECT_EQ(due_here(at(1000s), request(100ms, 1000s - 300ms), true), at(1000s - 200ms));
  EXPECT_EQ(due_here(at(1000s), request(100ms, 1000s + 5ms), true), at(1000s + 100ms))
      << "written later than it came: no more than was left";
}

TEST(TimeLeft, OtherwiseTheTimeOnTheWayIsGivenBack) {
  for (const nanoseconds clock : {1000s, 0s, 5000s})
    EXPECT_EQ(due_here(at(1000s), request(100ms, clock), false), at(1000s + 100ms));
  EXPECT_EQ(due_here(at(1000s), {1'000'000, 0}, true), at(1000s + 1ms));
}

TEST(TimeLeft, ACallWithoutALimitHasNone) {
  EXPECT_EQ(due_here(at(1s), {}, true), Clock::time_point::max());
  EXPECT_EQ(due_here(at(1s), {0, 77}, true), Clock::time_point::max());
  EXPECT_EQ(due_here(at(1s), {kMax - 5, 5}, true), Clock::time_point::max())
      << "longer than time goes";
}

TEST(TimeLeft, SaysWhatIsLeft) {
  EXPECT_EQ(time_left(std::nullopt).left, kCallIsOver);
  EXPECT_EQ(time_left(Clock::time_point::max()).left, 0);
  EXPECT_EQ(time_left(Clock::time_point::max()).deadline, 0);
  const auto deadline = Clock::now() + 100s;
  const TimeLeft time = time_left(deadline);
  EXPECT_GT(time.left, nanoseconds(50s).count());
  EXPECT_LE(time.left, nanoseconds(100s).count());
  EXPECT_EQ(time.deadline,
            base::has_kernel_clock() ? nanoseconds(deadline.time_since_epoch()).count() : 0);
  EXPECT_EQ(time_left(Clock::now() - 1s).left, kCallIsOver);
}

TEST(TimeLeft, ARequestMaySayAnything) {
  for (const std::int64_t left : {std::int64_t{1}, std::int64_t{1'000'000}, kMax}) {
    for (const std::int64_t deadline : {kMin, std::int64_t{-1}, std::int64_t{1}, kMax}) {
      for (const bool one_clock : {false, true}) {
        const auto due = due_here(at(1000s), {left, deadline}, one_clock);
        if (left != kMax) {
          EXPECT_LE(due, at(1000s + nanoseconds(left)));
        }
      }
    }
  }
}

}  // namespace
}  // namespace stitch::rpc::time_left_test
