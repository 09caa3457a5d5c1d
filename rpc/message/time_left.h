#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include "stitch/base/byte_io.h"
#include "stitch/base/bytes.h"
#include "stitch/transport/wire/frame.h"

namespace stitch::rpc {

// What a request says of the time that its call has left (PROTOCOL.md, section 3), in ns, at this
// offset of its body. 0: there is no limit. Less than 0, as kCallIsOver: its caller does not wait
// any more, and the callee does not run it. Behind it stands the deadline by the caller's monotonic
// clock, in ns, 0 where there is no limit: the difference is when the time left was written.
inline constexpr std::size_t kTimeLeftOffset = 16;
inline constexpr std::size_t kTimeLeftBytes = 16;
inline constexpr std::int64_t kCallIsOver = -1;

struct TimeLeft {
  std::int64_t left = 0;
  std::int64_t deadline = 0;
};

// By the deadline of the call, max() for none; nothing: the call has ended.
[[nodiscard]] inline TimeLeft time_left(
    const std::optional<std::chrono::steady_clock::time_point>& deadline) {
  using Clock = std::chrono::steady_clock;
  if (!deadline) return {kCallIsOver, 0};
  if (*deadline == Clock::time_point::max()) return {};
  const std::chrono::nanoseconds left = *deadline - Clock::now();
  const std::chrono::nanoseconds by_clock = deadline->time_since_epoch();
  return {left.count() > 0 ? left.count() : kCallIsOver, by_clock.count()};
}

// REQUIRES: `frame` is that of a request, with a whole call header.
inline void put_time_left(base::Bytes& frame, const TimeLeft& time) noexcept {
  const std::int64_t both[] = {base::to_wire_order(time.left), base::to_wire_order(time.deadline)};
  static_assert(sizeof(both) == kTimeLeftBytes);
  std::memcpy(frame.data() + transport::FrameBuilder::body_offset() + kTimeLeftOffset, both,
              sizeof(both));
}

}  // namespace stitch::rpc
