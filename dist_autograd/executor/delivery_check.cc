#include "stitch/dist_autograd/executor/delivery_check.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace stitch::dist_autograd {
namespace {

#ifdef NDEBUG
std::atomic<bool> is_on{false};
#else
std::atomic<bool> is_on{true};
#endif

}  // namespace

void DeliveryCheck::switch_on() { is_on.store(true, std::memory_order_relaxed); }

DeliveryCheck::DeliveryCheck(const Plan& plan) : plan_(plan) {
  if (is_on.load(std::memory_order_relaxed)) nodes_.resize(plan.size());
}

void DeliveryCheck::on_start(std::uint32_t node) {
  if (plan_.pending(node) == 0 && !plan_.trimmed(node)) nodes_[node].wanted = 1;
}

void DeliveryCheck::on_arrival(std::uint32_t node) {
  require(plan_.kind(node) == NodeKind::send, "only send nodes get messages", node);
  require(!nodes_[node].arrived, "a send node gets one gradient message or one kill", node);
  nodes_[node].arrived = true;
}

void DeliveryCheck::on_delivery(std::uint32_t node) {
  require(!plan_.trimmed(node), "nothing goes to a node that is not marked", node);
  require(nodes_[node].deliveries < wanted(node), "no more deliveries than edges", node);
  ++nodes_[node].deliveries;
}

void DeliveryCheck::on_run(std::uint32_t node) {
  require(nodes_[node].deliveries == wanted(node), "a node runs with complete inputs", node);
  require(!nodes_[node].ran, "a node runs at most once a pass", node);
  nodes_[node].ran = true;
}

void DeliveryCheck::on_resolved() const {
  for (std::uint32_t i = 0; i < plan_.size(); ++i)
    require(plan_.trimmed(i) || nodes_[i].deliveries == wanted(i), "deliveries and kills add up",
            i);
}

void DeliveryCheck::require(bool holds, const char* rule, std::uint32_t node) const {
  if (holds) [[likely]]
    return;
  std::fprintf(stderr, "stitch: a rule of backward passes is broken: %s (node %u, %s)\n", rule,
               node, plan_.node(node).name().c_str());
  std::abort();
}

}  // namespace stitch::dist_autograd
