#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>

#include "stitch/rpc/message/peer_limits.h"
#include "stitch/rpc/peers/frame_queue.h"
#include "stitch/rpc/peers/one_way_credits.h"
#include "stitch/rpc/peers/peer_budget.h"
#include "stitch/rpc/peers/unwritten_replies.h"

namespace stitch::rpc {

// What is counted between this worker and one life of a peer, each kind of message by a part of its
// own. Thread contract: any thread.
struct PeerFlow {
  static constexpr std::size_t kCallBytes = PeerBudget::kCallBytes;

  explicit PeerFlow(const PeerLimits& limits)
      : budget(limits),
        one_way(budget.limits()),
        replies(budget.limits().bytes),
        frames(budget.limits().bytes / 2) {}

  [[nodiscard]] const PeerLimits& limits() const noexcept { return budget.limits(); }

  // ---- tensors that come beside their message, from device to device
  // The bytes of a request, here and at its receiver, that has `beside` bytes of them. Together
  // they count at most half of the limit, with the call.
  [[nodiscard]] std::size_t counted(std::size_t bytes, std::size_t beside) const noexcept {
    const std::size_t half = limits().bytes / 2;
    const std::size_t most = half > kCallBytes ? half - kCallBytes : 0;
    return std::max(bytes, std::min(bytes + std::min(beside, half), most));
  }
  // The bytes of a reply or a frame, likewise: it takes as much as a call while it waits for them.
  [[nodiscard]] std::size_t counted_data(std::size_t bytes, std::size_t beside) const noexcept {
    return std::min(counted(bytes, beside) + kCallBytes, limits().bytes);
  }
  // Counts a frame of the peer that waits for tensors beside it. False when that exceeds
  // the limit; end_received_data() in any case.
  [[nodiscard]] bool count_received_data(std::size_t bytes) noexcept {
    return received_data.fetch_add(bytes) + bytes <= limits().bytes;
  }
  void end_received_data(std::size_t bytes) noexcept { received_data.fetch_sub(bytes); }

  // The peer is lost, or this worker stops: nothing waits from now on.
  void give_up() noexcept {
    budget.give_up();
    frames.give_up();
    replies.give_up();
  }

  PeerBudget budget;                          // requests
  OneWayCredits one_way;                      // how one-way requests give their room back
  UnwrittenReplies replies;                   // and the handlers that are parked for them
  FrameQueue frames;                          // gradients
  std::atomic<std::size_t> control_bytes{0};  // control frames, not written yet
  std::atomic<std::size_t> received_data{0};
};

}  // namespace stitch::rpc
