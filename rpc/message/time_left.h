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
// any more, and the callee does not run it.
inline constexpr std::size_t kTimeLeftOffset = 16;
inline constexpr std::int64_t kCallIsOver = -1;

// By the deadline of the call, max() for none; nothing: the call has ended.
[[nodiscard]] inline std::int64_t time_left(
    const std::optional<std::chrono::steady_clock::time_point>& deadline) {
  using Clock = std::chrono::steady_clock;
  if (!deadline) return kCallIsOver;
  if (*deadline == Clock::time_point::max()) return 0;
  const std::chrono::nanoseconds left = *deadline - Clock::now();
  return left.count() > 0 ? left.count() : kCallIsOver;
}

// REQUIRES: `frame` is that of a request, with a whole call header.
inline void put_time_left(base::Bytes& frame, std::int64_t ns) noexcept {
  const auto left = base::to_wire_order(ns);
  std::memcpy(frame.data() + transport::FrameBuilder::body_offset() + kTimeLeftOffset, &left,
              sizeof(left));
}

}  // namespace stitch::rpc
