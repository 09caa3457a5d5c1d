#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace stitch::rpc {

// Which numbers of a stream have been received: all up to cumulative(), and some beyond it. The
// numbers start at 1. Thread contract: one thread at a time, except cumulative().
class ReceivedNumbers {
 public:
  enum class Taken : std::uint8_t { fresh, known, too_scattered };
  // More gaps than this are not remembered. Threads that send at the same time leave a few, and
  // transports that lose messages without breaking, as in tests, one for each.
  static constexpr std::size_t kMaxGaps = std::size_t{1} << 12;

  [[nodiscard]] Taken take(std::uint64_t number) {
    const std::uint64_t reached = cumulative_.load(std::memory_order_relaxed);
    if (number == reached + 1 && beyond_.empty()) [[likely]] {
      cumulative_.store(number, std::memory_order_relaxed);
      return Taken::fresh;
    }
    if (number <= reached) return Taken::known;
    return take_beyond(number);
  }
  [[nodiscard]] std::uint64_t cumulative() const noexcept {
    return cumulative_.load(std::memory_order_relaxed);
  }
  [[nodiscard]] std::size_t gaps() const noexcept { return beyond_.size(); }

 private:
  // A run of numbers that have been received, both ends included.
  struct Run {
    std::uint64_t first;
    std::uint64_t last;
  };

  Taken take_beyond(std::uint64_t number) {
    // The first run that ends at `number` - 1 or later.
    auto run = std::lower_bound(
        beyond_.begin(), beyond_.end(), number,
        [](const Run& each, std::uint64_t wanted) { return each.last + 1 < wanted; });
    if (run != beyond_.end() && run->first <= number && number <= run->last) return Taken::known;
    if (run != beyond_.end() && run->last + 1 == number) {
      run->last = number;
      const auto next = run + 1;
      if (next != beyond_.end() && next->first == number + 1) {
        run->last = next->last;
        beyond_.erase(next);
      }
    } else if (run != beyond_.end() && run->first == number + 1) {
      run->first = number;
    } else if (number != cumulative_.load(std::memory_order_relaxed) + 1) {
      if (beyond_.size() >= kMaxGaps) return Taken::too_scattered;
      beyond_.insert(run, Run{number, number});
    } else {
      cumulative_.store(number, std::memory_order_relaxed);
    }
    if (!beyond_.empty() &&
        beyond_.front().first == cumulative_.load(std::memory_order_relaxed) + 1) {
      cumulative_.store(beyond_.front().last, std::memory_order_relaxed);
      beyond_.erase(beyond_.begin());
    }
    return Taken::fresh;
  }

  std::atomic<std::uint64_t> cumulative_{0};
  std::vector<Run> beyond_;  // ascending, with a gap before each
};

}  // namespace stitch::rpc
