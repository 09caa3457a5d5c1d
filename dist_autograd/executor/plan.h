#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stitch/base/recycler.h"
#include "stitch/dist_autograd/graph/compat.h"
#include "stitch/dist_autograd/graph/gradient_store.h"
#include "stitch/dist_autograd/graph/recv_node.h"
#include "stitch/dist_autograd/graph/send_node.h"

namespace stitch::dist_autograd {

// How a pass treats a node.
enum class NodeKind : std::uint8_t {
  plain,       // run it, deliver its outputs
  accumulate,  // a leaf: its gradient goes to the context
  recv,        // its gradient goes to another worker
  send,        // entered by gradients from another worker; besides, plain
};

// The part of the graph over all workers that one pass may touch on this worker: everything
// reachable from the roots and from the send nodes, in compressed rows. Numbers nodes densely, so
// that what a pass knows of a node is a vector element. Immutable after construction, so any thread
// may read it. Owns the nodes it was built from; edges keep the others alive.
class Plan {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
  struct Target {
    std::uint32_t node = kNone;  // kNone: an edge to nowhere (that input needs no gradient)
    std::uint32_t input = 0;
  };

  // `roots`: gradient edges of the tensors that backward() was called on, empty on other workers.
  // `sends`: every send node of the context that may receive gradients. `inputs`: the only leaves
  // that get gradients; nodes that lead neither to one of them nor to a recv node are trimmed.
  Plan(std::vector<Edge> roots, std::vector<NodePtr> sends,
       std::optional<LeafSet> inputs = std::nullopt);
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  [[nodiscard]] std::uint32_t size() const noexcept {
    return static_cast<std::uint32_t>(nodes_.size());
  }
  [[nodiscard]] Node& node(std::uint32_t index) const noexcept { return *nodes_[index]; }
  [[nodiscard]] NodeKind kind(std::uint32_t index) const noexcept { return kinds_[index]; }
  // One per output of the node, in order.
  [[nodiscard]] std::span<const Target> edges(std::uint32_t index) const noexcept {
    return {targets_.data() + offsets_[index], targets_.data() + offsets_[index + 1]};
  }
  // Deliveries that must arrive before the node runs: its incoming edges, one more for a send node.
  [[nodiscard]] std::uint32_t pending(std::uint32_t index) const noexcept {
    return pending_[index];
  }
  // True when a recv node is reachable from it: running it early sends messages early.
  [[nodiscard]] bool leads_to_recv(std::uint32_t index) const noexcept {
    return (leads_to_[index] & kToRecv) != 0;
  }
  // True when the pass does without this node: no edge leads to it, it neither runs nor is dead.
  [[nodiscard]] bool trimmed(std::uint32_t index) const noexcept {
    return inputs_ && kinds_[index] != NodeKind::send && leads_to_[index] == 0;
  }
  // The number of nodes that are not trimmed.
  [[nodiscard]] std::uint32_t untrimmed() const noexcept { return untrimmed_; }

  // The devices that its nodes belong to, 0 being the CPU, which is always one of them.
  [[nodiscard]] std::size_t devices() const noexcept { return 1 + other_devices_.size(); }
  [[nodiscard]] c10::Device device(std::size_t device) const noexcept {
    return device == 0 ? c10::Device(c10::kCPU) : other_devices_[device - 1];
  }
  // That of a node: the first one whose work is queued on streams that it has gradients on, or the
  // CPU.
  [[nodiscard]] std::size_t device_of(std::uint32_t index) const noexcept {
    return device_of_.empty() ? 0 : device_of_[index];
  }

  [[nodiscard]] std::span<const Target> roots() const noexcept { return roots_; }
  [[nodiscard]] std::span<const std::uint32_t> sends() const noexcept { return sends_; }
  // The send node of that link, or kNone.
  [[nodiscard]] std::uint32_t find(LinkId link) const noexcept;
  [[nodiscard]] SendNode& send(std::uint32_t index) const noexcept {
    return static_cast<SendNode&>(*nodes_[index]);
  }
  [[nodiscard]] RecvNode& recv(std::uint32_t index) const noexcept {
    return static_cast<RecvNode&>(*nodes_[index]);
  }

 private:
  enum LeadsTo : std::uint8_t { kToRecv = 1, kToInput = 2 };
  std::uint32_t walk(Node* start);
  std::uint32_t add(Node* node);
  [[nodiscard]] std::uint16_t add_device(const Node& node);

  std::vector<Edge> kept_roots_;
  std::vector<NodePtr> kept_sends_;
  std::vector<Node*> nodes_;
  std::vector<NodeKind> kinds_;
  std::vector<c10::Device> other_devices_;
  std::vector<std::uint16_t> device_of_;  // empty: all nodes belong to the CPU
  std::vector<std::uint32_t> pending_;
  std::vector<std::uint8_t> leads_to_;  // bits of LeadsTo
  std::vector<std::uint32_t> offsets_;
  std::vector<Target> targets_;
  std::vector<Target> roots_;
  std::vector<std::uint32_t> sends_;
  template <class Key>
  using Indices = std::unordered_map<Key, std::uint32_t, std::hash<Key>, std::equal_to<>,
                                     base::RecyclingAllocator<std::pair<const Key, std::uint32_t>>>;
  Indices<LinkId> links_;
  std::optional<LeafSet> inputs_;
  std::uint32_t untrimmed_ = 0;
  Indices<const Node*> indices_;  // only while building
};

// The nodes known to be used by the loss: what exact mode determines. Only grows. Not thread-safe.
class Marks {
 public:
  explicit Marks(const Plan& plan) : plan_(plan), marked_(plan.size(), 0) {}
  // Marks everything reachable from `source`; appends the recv nodes reached for the first time.
  void spread(std::uint32_t source, std::vector<std::uint32_t>& recvs);
  [[nodiscard]] bool marked(std::uint32_t index) const noexcept { return marked_[index] != 0; }

 private:
  const Plan& plan_;
  std::vector<std::uint8_t> marked_;
  std::vector<std::uint32_t> stack_;
};

}  // namespace stitch::dist_autograd
