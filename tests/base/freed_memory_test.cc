#include <sys/resource.h>

#include "stitch/base/freed_memory.h"
#include "tests/support/plain_test.h"
#include "tests/support/resident_memory.h"

namespace stitch::base::freed_memory_test {
namespace {

using testing::resident_bytes;

long page_faults_of_this_thread() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_minflt;
}

// What a step of training does: takes a few blocks, writes them, and frees them all.
void use_12_mib() {
  constexpr std::size_t kBytes = std::size_t{4} << 20;
  std::array<void*, 3> blocks{};
  for (void*& block : blocks) {
    block = std::malloc(kBytes);
    std::memset(block, 1, kBytes);
  }
  for (void* const block : blocks) std::free(block);
}

TEST(FreedMemory, IsTakenAgainWithoutPageFaults) {
  if (testing::kAddressSanitizer || testing::kThreadSanitizer)
    GTEST_SKIP() << "a sanitizer brings its own malloc";
  keep_freed_memory();
  long faults = 0;
  std::thread([&faults] {  // not the main arena
    for (int i = 0; i < 4; ++i) use_12_mib();
    const long before = page_faults_of_this_thread();
    for (int i = 0; i < 10; ++i) use_12_mib();
    faults = page_faults_of_this_thread() - before;
  })
      .join();
  EXPECT_LT(faults, 1000) << "returning it to the kernel costs 30,000";
}

TEST(FreedMemory, GoesBackFromBetweenBlocksInUse) {
  if (testing::kAddressSanitizer || testing::kThreadSanitizer)
    GTEST_SKIP() << "a sanitizer brings its own malloc";
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  keep_freed_memory();
  std::thread([] {  // not the main arena
    std::vector<void*> blocks(32);
    for (void*& block : blocks) {
      block = std::malloc(kMiB);
      std::memset(block, 1, kMiB);
    }
    for (std::size_t i = 0; i + 1 < blocks.size(); i += 2) std::free(blocks[i]);
    const std::size_t before = resident_bytes();
    return_freed_memory();
    EXPECT_LE(resident_bytes(), before - 14 * kMiB);
    for (std::size_t i = 1; i < blocks.size(); i += 2) std::free(blocks[i]);
  })
      .join();
}

}  // namespace
}  // namespace stitch::base::freed_memory_test
