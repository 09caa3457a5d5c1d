#pragma once

#include <chrono>

namespace stitch::base {

// Deadlines on the steady clock. time_point::max() means no deadline. Thread contract: any thread.

// `timeout` from now: now for a negative one, no deadline for one that the clock cannot represent.
[[nodiscard]] inline std::chrono::steady_clock::time_point deadline_after(
    std::chrono::nanoseconds timeout) noexcept {
  using Time = std::chrono::steady_clock::time_point;
  const Time now = std::chrono::steady_clock::now();
  if (timeout.count() <= 0) return now;
  return timeout < Time::max() - now ? now + timeout : Time::max();
}

// The same for every other unit; fractions are rounded up.
template <class Rep, class Period>
[[nodiscard]] std::chrono::steady_clock::time_point deadline_after(
    std::chrono::duration<Rep, Period> timeout) noexcept {
  using Seconds = std::chrono::duration<double>;
  constexpr Seconds kMax(std::chrono::nanoseconds::max());
  if (Seconds(timeout) <= -kMax) return deadline_after(std::chrono::nanoseconds(0));
  if (!(Seconds(timeout) < kMax)) return std::chrono::steady_clock::time_point::max();
  return deadline_after(std::chrono::ceil<std::chrono::nanoseconds>(timeout));
}

// For timeouts of which zero (or less) means that there is none.
[[nodiscard]] inline std::chrono::steady_clock::time_point deadline_or_none(
    std::chrono::nanoseconds timeout) noexcept {
  return timeout.count() <= 0 ? std::chrono::steady_clock::time_point::max()
                              : deadline_after(timeout);
}

}  // namespace stitch::base
