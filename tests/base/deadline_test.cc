#include "stitch/base/deadline.h"

#include <gtest/gtest.h>

#include <chrono>
#include <limits>

namespace stitch::base::deadline_test {
namespace {

using namespace std::chrono_literals;
using Time = std::chrono::steady_clock::time_point;
constexpr Time kNone = Time::max();

TEST(Deadline, IsTheTimeoutFromNow) {
  const Time before = std::chrono::steady_clock::now();
  const Time nanoseconds = deadline_after(5'000'000'000ns);
  const Time hours = deadline_after(2h);
  const Time fraction = deadline_after(std::chrono::duration<double, std::milli>(0.5));
  const Time after = std::chrono::steady_clock::now();
  EXPECT_GE(nanoseconds, before + 5s);
  EXPECT_LE(nanoseconds, after + 5s);
  EXPECT_GE(hours, before + 2h);
  EXPECT_LE(hours, after + 2h);
  EXPECT_GE(fraction, before + 500us);
  EXPECT_LE(fraction, after + 501us);
}

TEST(Deadline, OfANegativeTimeoutHasPassed) {
  using std::chrono::milliseconds;
  using std::chrono::nanoseconds;
  for (const Time deadline : {deadline_after(-1ns), deadline_after(nanoseconds::min()),
                              deadline_after(-1ms), deadline_after(milliseconds::min())}) {
    EXPECT_LE(deadline, std::chrono::steady_clock::now());
    EXPECT_GT(deadline, std::chrono::steady_clock::now() - 1min);
  }
}

TEST(Deadline, ThatTheClockCannotRepresentIsNone) {
  EXPECT_EQ(deadline_after(std::chrono::nanoseconds::max()), kNone);
  EXPECT_EQ(deadline_after(std::chrono::milliseconds::max()), kNone);
  EXPECT_EQ(deadline_after(std::chrono::hours::max()), kNone);
  using Seconds = std::chrono::duration<double>;
  EXPECT_EQ(deadline_after(Seconds(std::numeric_limits<double>::infinity())), kNone);
  EXPECT_EQ(deadline_after(Seconds(1e30)), kNone);
  // A minute before the largest representable one.
  const auto left = kNone - std::chrono::steady_clock::now() - 1min;
  EXPECT_LT(deadline_after(left), kNone);
}

TEST(Deadline, OfAnOptionalTimeoutIsNoneForZero) {
  EXPECT_EQ(deadline_or_none(0ns), kNone);
  EXPECT_EQ(deadline_or_none(-1ns), kNone);
  EXPECT_EQ(deadline_or_none(std::chrono::nanoseconds::max()), kNone);
  EXPECT_LT(deadline_or_none(1s), kNone);
}

}  // namespace
}  // namespace stitch::base::deadline_test
