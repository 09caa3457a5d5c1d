#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>

#include "stitch/rpc/message/time_left.h"

namespace stitch::rpc {

// When a call of one life of a worker is due here. Its request says what time was left when it was
// written, and the deadline by the caller's monotonic clock (TimeLeft). Where both workers have one
// clock that is the deadline here. Else the clocks differ by an unknown time, and the quickest
// request of the last 5 to 15 s stands for one that was not on its way at all: what another one
// took longer is taken off the time that it has left. What all of them take is not seen then, nor
// what the only one in that time takes. Clocks may drift apart by up to 500 us a second; no call is
// due too early for that. Whatever the request says, a call has no more time than was left.
// Thread contract: any thread. Takes no lock and no memory. At two threads at once, one request may
// not be counted among the quickest, so that others get more time.
class PeerClock {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::nanoseconds kWindow = std::chrono::seconds(5);

  explicit PeerClock(bool shared) noexcept : shared_(shared) {}
  PeerClock(const PeerClock&) = delete;
  PeerClock& operator=(const PeerClock&) = delete;

  // Of a request that has come at `arrived`; max() for one without a limit. REQUIRES: the call is
  // not over (kCallIsOver).
  [[nodiscard]] Clock::time_point due(Clock::time_point arrived, const TimeLeft& time) noexcept {
    if (time.left == 0) return Clock::time_point::max();
    const std::int64_t now = arrived.time_since_epoch().count();
    std::int64_t latest = 0;
    if (__builtin_add_overflow(now, time.left, &latest)) return Clock::time_point::max();
    if (time.deadline == 0) return at(latest);
    std::int64_t difference = 0;  // of the clocks, and of what the quickest request took
    if (!shared_ && !quickest(now, time, difference)) return at(latest);
    std::int64_t due = 0;
    if (__builtin_add_overflow(time.deadline, difference, &due)) return at(latest);
    return at(std::min(due, latest));
  }

 private:
  [[nodiscard]] static Clock::time_point at(std::int64_t ns) noexcept {
    return Clock::time_point(std::chrono::nanoseconds(ns));
  }
  // False for what no clock can say.
  bool quickest(std::int64_t now, const TimeLeft& time, std::int64_t& difference) noexcept {
    std::int64_t written = 0;  // by the caller's clock
    std::int64_t took = 0;     // plus the difference of the clocks
    if (__builtin_sub_overflow(time.deadline, time.left, &written) ||
        __builtin_sub_overflow(now, written, &took))
      return false;
    std::int64_t began = began_.load(std::memory_order_relaxed);
    if (now - began >= kWindow.count() &&
        began_.compare_exchange_strong(began, now, std::memory_order_relaxed)) {
      const bool next = now - began < 2 * kWindow.count();
      before_.store(next ? lately_.load(std::memory_order_relaxed) : kNever,
                    std::memory_order_relaxed);
      lately_.store(took, std::memory_order_relaxed);
      began = now;
    }
    std::int64_t least = lately_.load(std::memory_order_relaxed);
    while (took < least &&
           !lately_.compare_exchange_weak(least, took, std::memory_order_relaxed)) {
    }
    least = std::min({least, took, before_.load(std::memory_order_relaxed)});
    const std::int64_t age = now - began + 2 * kWindow.count();  // at most, of the quickest
    return !__builtin_add_overflow(least, std::max<std::int64_t>(age, 0) / kMaxDrift, &difference);
  }

  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
  static constexpr std::int64_t kMaxDrift = 2000;  // one part in so many
  const bool shared_;
  std::atomic<std::int64_t> began_{0};  // the present window; 0, before any: long ago
  std::atomic<std::int64_t> lately_{kNever};
  std::atomic<std::int64_t> before_{kNever};
};

}  // namespace stitch::rpc
