#include "stitch/base/parse_duration.h"

#include <gtest/gtest.h>

#include <chrono>

namespace parse_duration_test {
namespace {

using namespace std::chrono_literals;
using stitch::base::parse_duration;

TEST(ParseDuration, ReadsANumberWithAUnit) {
  EXPECT_EQ(parse_duration("250us"), 250us);
  EXPECT_EQ(parse_duration("500ms"), 500ms);
  EXPECT_EQ(parse_duration("1.5s"), 1500ms);
  EXPECT_EQ(parse_duration("2m"), 2min);
  EXPECT_EQ(parse_duration("1h"), 1h);
  EXPECT_EQ(parse_duration("3"), 3s);
  EXPECT_EQ(parse_duration("0"), 0s);
}

TEST(ParseDuration, EndsAtTheLargestTime) {
  EXPECT_EQ(parse_duration("1e30h"), std::chrono::nanoseconds::max());
  EXPECT_EQ(parse_duration("inf"), std::chrono::nanoseconds::max());
}

TEST(ParseDuration, RefusesOtherTexts) {
  for (const char* text : {"", "s", "soon", "-1s", "5 s", "5sec", "5ss", "nan", "0x5s"})
    EXPECT_EQ(parse_duration(text), std::nullopt) << text;
}

}  // namespace
}  // namespace parse_duration_test
