#pragma once

#include <chrono>
#include <cstddef>
#include <map>
#include <vector>

#include "stitch/dist_autograd/graph/recv_node.h"
#include "stitch/dist_autograd/messages.h"

namespace stitch::dist_autograd {

// Gradients of one pass on their way out, gathered per peer: one message carries many links.
// Touched only on the strand.
class Outbox {
 public:
  struct Parcel {
    WorkerInfo to;
    std::vector<wire::GradientEntry> entries;
    std::vector<at::Tensor> tensors;  // the defined ones, in the order of the entries
  };

  // Adds the gradients of a link. `gradient_link` and `differentiable`: see wire::GradientEntry.
  void add(const RecvNode& node, variable_list gradients, std::uint64_t gradient_link,
           std::vector<bool> differentiable);
  // True when what waits should leave before the next node runs: it is large, or has waited for
  // kPatience.
  [[nodiscard]] bool due() const;
  [[nodiscard]] bool empty() const noexcept { return parcels_.empty(); }
  // Takes out everything, one parcel per peer.
  [[nodiscard]] std::vector<Parcel> take();

  static constexpr std::size_t kEnough = std::size_t{256} << 10;
  static constexpr std::chrono::microseconds kPatience{50};

 private:
  std::map<WorkerId, Parcel> parcels_;
  std::size_t bytes_ = 0;
  std::chrono::steady_clock::time_point since_;
};

}  // namespace stitch::dist_autograd
