#include "stitch/base/freed_memory.h"

#include <malloc.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <limits>

namespace stitch::base {

namespace {

// The largest block, with its header, after which glibc still raises its thresholds: that for
// blocks of their own mapping to the block's size, that for returning memory to twice as much.
constexpr std::size_t kBlockBytes = (std::size_t{32} << 20) - (std::size_t{16} << 10);

// After returning memory, in multiples of the time that it took, and at least.
constexpr int kRest = 9;
constexpr std::chrono::milliseconds kShortestRest{1};

std::chrono::nanoseconds time_of_this_thread() noexcept {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

bool free_a_large_block() noexcept {
  void* const volatile block = std::malloc(kBlockBytes);  // volatile: the pair is not optimized out
  std::free(block);  // never touched: it costs two system calls
  return true;
}

}  // namespace

void return_freed_memory() noexcept {
  using Clock = std::chrono::steady_clock;
  static std::atomic<Clock::rep> next{0};
  Clock::rep due = next.load(std::memory_order_relaxed);
  if (Clock::now().time_since_epoch().count() < due ||
      !next.compare_exchange_strong(due, std::numeric_limits<Clock::rep>::max()))
    return;
  const auto began = time_of_this_thread();
  ::malloc_trim(0);
  const auto rest =
      std::max<Clock::duration>(kRest * (time_of_this_thread() - began), kShortestRest);
  next.store((Clock::now() + rest).time_since_epoch().count());
}

void keep_freed_memory() noexcept {
  static const bool done = free_a_large_block();
  static_cast<void>(done);
}

}  // namespace stitch::base
