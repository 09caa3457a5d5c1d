#pragma once

#include <cassert>
#include <cstdint>
#include <vector>

#include "stitch/dist_autograd/executor/plan.h"

namespace stitch::dist_autograd {

#ifdef NDEBUG

// Without assertions: nothing.
class DeliveryCheck {
 public:
  explicit DeliveryCheck(const Plan&) {}
  void starts(std::uint32_t) {}
  void arrives(std::uint32_t) {}
  void delivers(std::uint32_t) {}
  void runs(std::uint32_t) {}
  void resolved() {}
};

#else

// Asserts what the strand of a pass relies on: a node runs at most once, a send node gets one
// gradient message or one kill, no node gets more deliveries than it waits for, and at the end each
// has got exactly those. Thread contract: only on the strand.
class DeliveryCheck {
 public:
  explicit DeliveryCheck(const Plan& plan) : plan_(plan), nodes_(plan.size()) {}
  // A root node is ready without having been waited for.
  void starts(std::uint32_t node) {
    if (plan_.pending(node) == 0 && !plan_.trimmed(node)) nodes_[node].wanted = 1;
  }
  // A gradient message or a kill.
  void arrives(std::uint32_t node) {
    assert(plan_.kind(node) == NodeKind::send && "only send nodes get messages");
    assert(!nodes_[node].arrived && "a send node gets one gradient message or one kill");
    nodes_[node].arrived = true;
  }
  void delivers(std::uint32_t node) {
    assert(!plan_.trimmed(node) && "no delivery to a trimmed node");
    assert(nodes_[node].deliveries < wanted(node) && "no more deliveries than edges");
    ++nodes_[node].deliveries;
  }
  void runs(std::uint32_t node) {
    assert(nodes_[node].deliveries == wanted(node) && "a node runs with complete inputs");
    assert(!nodes_[node].ran && "a node runs at most once a pass");
    nodes_[node].ran = true;
  }
  // Every node has run or is dead.
  void resolved() const {
    for (std::uint32_t i = 0; i < plan_.size(); ++i) {
      assert((plan_.trimmed(i) || nodes_[i].deliveries == wanted(i)) &&
             "deliveries and kills add up");
    }
  }

 private:
  struct Node {
    std::uint32_t deliveries = 0;
    std::uint32_t wanted = 0;
    bool arrived = false;
    bool ran = false;
  };
  [[nodiscard]] std::uint32_t wanted(std::uint32_t node) const {
    return plan_.pending(node) + nodes_[node].wanted;
  }

  const Plan& plan_;
  std::vector<Node> nodes_;
};

#endif

}  // namespace stitch::dist_autograd
