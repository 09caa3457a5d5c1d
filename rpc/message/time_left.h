#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include "stitch/base/byte_io.h"
#include "stitch/base/bytes.h"
#include "stitch/base/kernel_clock.h"
#include "stitch/transport/wire/frame.h"

namespace stitch::rpc {

// What a request says of the time that its call has left (PROTOCOL.md, section 3), in ns, at this
// offset of its body. 0: there is no limit. Less than 0, as kCallIsOver: its caller does not wait
// any more, and the callee does not run it. Behind it stands the deadline by the caller's monotonic
// clock, in ns; 0 where there is no limit, or where that is not the clock of the kernel.
inline constexpr std::size_t kTimeLeftOffset = 16;
inline constexpr std::size_t kTimeLeftBytes = 16;
inline constexpr std::int64_t kCallIsOver = -1;

struct TimeLeft {
  std::int64_t left = 0;
  std::int64_t deadline = 0;
};

// Of a call that has so much time left until its deadline, max() for none.
[[nodiscard]] inline TimeLeft time_left(std::chrono::nanoseconds left,
                                        std::chrono::steady_clock::time_point deadline) {
  using Clock = std::chrono::steady_clock;
  if (deadline == Clock::time_point::max()) return {};
  const std::chrono::nanoseconds by_clock = deadline.time_since_epoch();
  return {left.count() > 0 ? left.count() : kCallIsOver,
          base::has_kernel_clock() ? by_clock.count() : 0};
}
// By the deadline of the call; nothing: the call has ended.
[[nodiscard]] inline TimeLeft time_left(
    const std::optional<std::chrono::steady_clock::time_point>& deadline) {
  if (!deadline) return {kCallIsOver, 0};
  return time_left(*deadline - std::chrono::steady_clock::now(), *deadline);
}

// When a call is due here whose request came at `arrived`, max() for one without a limit.
// `one_clock`: it came from a process under the same kernel. Then the time that it was on its way
// is known, and taken off; else it is given back. Whatever the request says, a call has no more
// time than it had left. REQUIRES: the call is not over.
[[nodiscard]] inline std::chrono::steady_clock::time_point due_here(
    std::chrono::steady_clock::time_point arrived, const TimeLeft& time, bool one_clock) noexcept {
  using Clock = std::chrono::steady_clock;
  const auto at = [](std::int64_t ns) { return Clock::time_point(std::chrono::nanoseconds(ns)); };
  if (time.left == 0) return Clock::time_point::max();
  std::int64_t latest = 0;
  const std::int64_t now = arrived.time_since_epoch().count();
  if (__builtin_add_overflow(now, time.left, &latest)) return Clock::time_point::max();
  if (!one_clock || time.deadline == 0 || !base::has_kernel_clock()) return at(latest);
  return at(std::min(latest, time.deadline));
}

// REQUIRES: `frame` is that of a request, with a whole call header.
inline void put_time_left(base::Bytes& frame, const TimeLeft& time) noexcept {
  const std::int64_t both[] = {base::to_wire_order(time.left), base::to_wire_order(time.deadline)};
  static_assert(sizeof(both) == kTimeLeftBytes);
  std::memcpy(frame.data() + transport::FrameBuilder::body_offset() + kTimeLeftOffset, both,
              sizeof(both));
}

}  // namespace stitch::rpc
