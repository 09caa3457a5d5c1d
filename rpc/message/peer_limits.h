#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>

namespace stitch::rpc {

// The limits that a worker sets towards each peer (Options of the same names). Between two workers
// the smaller value of both holds. A plain value.
struct PeerLimits {
  static constexpr std::size_t kMaxCalls = std::size_t{1} << 20;
  static constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

  std::size_t bytes = kNone;        // max_inflight_bytes
  std::size_t calls = kMaxCalls;    // max_inflight_calls
  std::size_t frame_bytes = kNone;  // max_frame_bytes

  [[nodiscard]] PeerLimits with(const PeerLimits& other) const noexcept {
    return {std::min(bytes, other.bytes), std::min(calls, other.calls),
            std::min(frame_bytes, other.frame_bytes)};
  }
};

}  // namespace stitch::rpc
