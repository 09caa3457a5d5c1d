#pragma once

#include <cstdint>
#include <vector>

#include "stitch/dist_autograd/executor/plan.h"

namespace stitch::dist_autograd {

// Asserts what the strand of a pass relies on: a node runs at most once, a send node gets one
// gradient message or one kill, no node gets more deliveries than it waits for, nothing goes to a
// node that the pass has not marked, and at the end each has got exactly what it waits for. Ends
// the process where one does not hold. On in debug builds; otherwise a strand has an empty one.
// Thread contract: one thread at a time; switch_on() from any thread.
class DeliveryCheck {
 public:
  // For strands that are made from now on, in all of this process. Tests of optimized builds do it.
  static void switch_on();

  explicit DeliveryCheck(const Plan& plan);

  // A root node is ready without having been waited for.
  void starts(std::uint32_t node) {
    if (!nodes_.empty()) on_start(node);
  }
  // A gradient message or a kill.
  void arrives(std::uint32_t node) {
    if (!nodes_.empty()) on_arrival(node);
  }
  void delivers(std::uint32_t node) {
    if (!nodes_.empty()) on_delivery(node);
  }
  void runs(std::uint32_t node) {
    if (!nodes_.empty()) on_run(node);
  }
  // Every node has run or is dead.
  void resolved() const {
    if (!nodes_.empty()) on_resolved();
  }

 private:
  struct Node {
    std::uint32_t deliveries = 0;
    std::uint32_t wanted = 0;
    bool arrived = false;
    bool ran = false;
  };
  void on_start(std::uint32_t node);
  void on_arrival(std::uint32_t node);
  void on_delivery(std::uint32_t node);
  void on_run(std::uint32_t node);
  void on_resolved() const;
  // `rule` is what does not hold for the node.
  void require(bool holds, const char* rule, std::uint32_t node) const;
  [[nodiscard]] std::uint32_t wanted(std::uint32_t node) const {
    return plan_.pending(node) + nodes_[node].wanted;
  }

  const Plan& plan_;
  std::vector<Node> nodes_;  // empty: nothing is checked
};

}  // namespace stitch::dist_autograd
