#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

#include "stitch/dist_autograd/graph/recv_node.h"
#include "stitch/dist_autograd/protocol/messages.h"
#include "stitch/rpc/message/message.h"

namespace stitch::dist_autograd {

// Outgoing gradients of one pass, batched per peer: one message carries many links. Thread
// contract: only where the strand calls its owner.
class Outbox {
 public:
  struct PeerBatch {
    WorkerId to;
    std::vector<wire::GradientEntry> entries;
    std::vector<at::Tensor> tensors;  // the defined ones, in the order of the entries
    // Where they belong there, for those with an origin on a device; ascending.
    std::vector<rpc::OutMessage::Placement> placements{};
  };

  // Adds the gradients of a link, which are so many bytes. `unreached`, `gradient_link` and
  // `differentiable`: see wire::GradientEntry.
  void add(const RecvNode& node, variable_list gradients, const Positions& unreached,
           std::size_t bytes, std::uint64_t gradient_link, Positions differentiable);
  // True when the batches should be sent before the next node runs: they hold kFlushBytes, or the
  // oldest gradient has waited for kFlushDelay.
  [[nodiscard]] bool due() const;
  // Whether so many bytes more leave room below `limit` in the message that they would share: what
  // is not refused link by link is not to be refused together.
  [[nodiscard]] bool fits(std::size_t bytes, std::size_t limit) const {
    return batches_.empty() || bytes_ + bytes <= limit / 2;
  }
  // The bytes of the gradients in it, sparse ones included.
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] bool empty() const noexcept { return batches_.empty(); }
  // Takes out everything, one batch per peer.
  [[nodiscard]] std::vector<PeerBatch> take();

  static constexpr std::size_t kFlushBytes = std::size_t{256} << 10;
  static constexpr std::chrono::microseconds kFlushDelay{50};

 private:
  std::vector<PeerBatch> batches_;  // few: a worker exchanges tensors with few others
  std::size_t bytes_ = 0;
  std::chrono::steady_clock::time_point since_;
};

}  // namespace stitch::dist_autograd
