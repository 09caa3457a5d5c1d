#include <limits>

#include "stitch/rref/lifetime/interval_set.h"
#include "tests/support/plain_test.h"

namespace stitch::rref::interval_set_test {
namespace {

TEST(IntervalSet, AgreesWithAPlainSetAndStaysSmall) {
  std::mt19937_64 random(7);
  IntervalSet intervals;
  std::set<std::uint64_t> plain;
  for (int i = 0; i < 5000; ++i) {
    const std::uint64_t value = random() % 1000;
    EXPECT_EQ(intervals.insert(value), plain.insert(value).second);
    EXPECT_EQ(intervals.contains(value ^ 1), plain.contains(value ^ 1));
  }
  for (std::uint64_t value = 0; value < 1000; ++value) intervals.insert(value);
  EXPECT_EQ(intervals.runs(), 1u);
  const auto last = std::numeric_limits<std::uint64_t>::max();
  EXPECT_TRUE(intervals.insert(last));
  EXPECT_TRUE(intervals.insert(last - 1));
  EXPECT_FALSE(intervals.insert(last));
  EXPECT_EQ(intervals.runs(), 2u);
}

TEST(IntervalSet, TakesInEverythingBelowANumber) {
  IntervalSet intervals;
  intervals.insert_below(0);
  EXPECT_EQ(intervals.runs(), 0u);
  for (const std::uint64_t value : {3u, 5u, 6u, 9u, 20u}) intervals.insert(value);
  intervals.insert_below(5);  // touches a run
  EXPECT_EQ(intervals.runs(), 3u);
  for (std::uint64_t value = 0; value < 25; ++value)
    EXPECT_EQ(intervals.contains(value), value < 7 || value == 9 || value == 20) << value;
  intervals.insert_below(2);
  EXPECT_EQ(intervals.runs(), 3u);
  intervals.insert_below(15);
  EXPECT_EQ(intervals.runs(), 2u);
  EXPECT_FALSE(intervals.contains(15));
  intervals.insert_below(std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(intervals.runs(), 1u);
}

TEST(IntervalSet, TakesInRunsAsIfNumberByNumber) {
  constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
  std::mt19937_64 random(8);
  for (int round = 0; round < 300; ++round) {
    IntervalSet intervals, one_by_one;
    // At both ends of what a number can be.
    const std::uint64_t from = round % 2 == 0 ? 0 : kMax - 39;
    for (int i = 0; i < 6; ++i) {
      const std::uint64_t first = from + random() % 40;
      const std::uint64_t last = first + random() % (kMax - first < 9 ? kMax - first + 1 : 9);
      intervals.insert_run(first, last);
      for (std::uint64_t value = first; value != last; ++value) one_by_one.insert(value);
      one_by_one.insert(last);
      EXPECT_EQ(intervals.runs(), one_by_one.runs());
    }
    for (std::uint64_t i = 0; i < 40; ++i)
      EXPECT_EQ(intervals.contains(from + i), one_by_one.contains(from + i)) << i;
  }
}

// A peer that leaves out every second number.
TEST(IntervalSet, HasALimitedNumberOfRuns) {
  IntervalSet intervals;
  const std::uint64_t last = 2 * IntervalSet::kMaxRuns + 5'000;
  for (std::uint64_t value = 0; value <= last; value += 2) intervals.insert(value);
  EXPECT_EQ(intervals.runs(), IntervalSet::kMaxRuns);
  EXPECT_TRUE(intervals.contains(1));
  EXPECT_FALSE(intervals.contains(last - 1));
  EXPECT_TRUE(intervals.insert(last - 1));
  intervals.insert_run(last + 2, last + 3);
  EXPECT_EQ(intervals.runs(), IntervalSet::kMaxRuns);
}

TEST(IntervalSet, NamesWhatIsMissing) {
  std::mt19937_64 random(9);
  for (int round = 0; round < 300; ++round) {
    IntervalSet intervals;
    std::set<std::uint64_t> plain;
    for (std::uint64_t i = random() % 40; i-- > 0;) {
      const std::uint64_t value = random() % 40;
      intervals.insert(value);
      plain.insert(value);
    }
    const std::uint64_t first = random() % 40, end = random() % 45;
    std::vector<std::uint64_t> missing;
    for (std::uint64_t value = first; value < end; ++value) {
      if (!plain.contains(value)) missing.push_back(value);
    }
    EXPECT_EQ(intervals.missing(first, end, 100), missing);
    if (missing.size() > 3) missing.erase(missing.begin(), missing.end() - 3);
    EXPECT_EQ(intervals.missing(first, end, 3), missing);
  }
}

}  // namespace
}  // namespace stitch::rref::interval_set_test
