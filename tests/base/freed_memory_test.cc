#include <sys/resource.h>

#include "stitch/base/freed_memory.h"
#include "tests/support/plain_test.h"

namespace stitch::base::freed_memory_test {
namespace {

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

}  // namespace
}  // namespace stitch::base::freed_memory_test
