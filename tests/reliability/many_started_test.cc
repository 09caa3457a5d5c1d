// Many processes that are started one by one, so that each loads libtorch for itself: what stitch
// takes beside it.
#include <cstdio>

#include "tests/support/plain_test.h"
#include "tests/support/process_world.h"

namespace many_started_test {
namespace {

using namespace std::chrono_literals;
using stitch::testing::kAddressSanitizer;
using stitch::testing::kThreadSanitizer;
using stitch::testing::ProcessWorld;

constexpr int kWorkers = 16;  // what each takes does not depend on how many there are

std::int64_t number_after(const std::string& word, const std::string& text) {
  const auto at = text.find(word);
  return at == std::string::npos ? 0 : std::stoll(text.substr(at + word.size()));
}

TEST(ManyProcesses, TakeLittleBesideLibtorchWhereEachLoadsIt) {
  ProcessWorld one(1, {MANY_PROGRAM, "alone"});
  ASSERT_EQ(one[0].wait(), 0) << one[0].err();
  const std::int64_t alone = number_after("own ", one[0].out());
  ASSERT_GT(alone, 0) << one[0].out();

  const auto start = std::chrono::steady_clock::now();
  ProcessWorld world(kWorkers, {MANY_PROGRAM}, {}, 120s);
  std::int64_t own = 0, share = 0;
  for (int rank = 0; rank < kWorkers; ++rank) {
    EXPECT_EQ(world[rank].wait(), 0) << rank << ": " << world[rank].err();
    EXPECT_EQ(world[rank].err(), "") << rank;
    own += number_after("own ", world[rank].out());
    share += number_after("share ", world[rank].out());
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  const double beside = static_cast<double>(own - kWorkers * alone) / kWorkers / 1024;
  std::printf("%d processes: %.1f s, %.0f MiB in all; each %.1f MiB beside libtorch's %.1f MiB\n",
              kWorkers, took.count(), static_cast<double>(share) / 1024, beside,
              static_cast<double>(alone) / 1024);
  if (kAddressSanitizer || kThreadSanitizer) return;  // they take more
  EXPECT_GT(share, own / 2);
  EXPECT_LT(beside, 8);
}

}  // namespace
}  // namespace many_started_test
