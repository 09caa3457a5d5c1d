// The memory of a fast caller and of a slow callee stays within max_inflight_bytes: what the system
// counts, with what the pool keeps, without what malloc keeps and the pages of files (code).
#include <cstdio>

#include "tests/support/plain_test.h"
#include "tests/support/process_world.h"

namespace flood_test {
namespace {

using namespace stitch::testing;

constexpr int kLimitKiB = 64 << 10;  // flood_program's

// `made_together_kib`: replies that handlers make at one moment, which count once they are made.
void flood(const std::string& what, int made_together_kib = 0) {
  ProcessWorld world(2, {FLOOD_PROGRAM, what, "10"}, {}, std::chrono::seconds(300));
  for (int rank = 0; rank < 2; ++rank) ASSERT_EQ(world[rank].wait(), 0) << world[rank].err();
  const std::string out = world[0].out() + world[1].out();
  std::printf("%s:\n%s", what.c_str(), out.c_str());
  const auto number_after = [&out](const std::string& word) {
    const auto at = out.find(word);
    return at == std::string::npos ? -1 : std::stoi(out.substr(at + word.size()));
  };
  const int made = number_after("made "), failed = number_after("failed ");
  const int caller = number_after("caller "), callee = number_after("callee ");
  EXPECT_GT(made, 10);
  EXPECT_EQ(failed, 0);
  if (kAddressSanitizer || kThreadSanitizer) return;  // they keep what is freed
  EXPECT_GT(caller, 0);
  EXPECT_GT(callee, 0);
  EXPECT_LE(caller, kLimitKiB * 11 / 10);
  EXPECT_LE(callee, kLimitKiB * 11 / 10 + made_together_kib);
}

TEST(Floods, OfSmallCallsStayWithinTheLimit) { flood("calls"); }
TEST(Floods, OfTensorsStayWithinTheLimit) { flood("tensors"); }
TEST(Floods, OfTensorsOfAllSizesStayWithinTheLimit) { flood("tensors of all sizes"); }
TEST(Floods, OfOneWayCallsStayWithinTheLimit) { flood("notify"); }
TEST(Floods, OfRepliesStayWithinTheLimit) { flood("replies"); }
TEST(Floods, OfRepliesThatComeTogetherStayWithinTheLimit) {
  flood("replies of coroutines", 16 << 10);
}

}  // namespace
}  // namespace flood_test
