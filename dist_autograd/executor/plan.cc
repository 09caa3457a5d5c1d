#include "stitch/dist_autograd/executor/plan.h"

#include <algorithm>

#include "stitch/dist_autograd/graph/device_order.h"

namespace stitch::dist_autograd {

namespace {

NodeKind kind_of(Node* node) {
  if (node->num_outputs() != 0) return NodeKind::plain;
  if (dynamic_cast<AccumulateGrad*>(node) != nullptr) return NodeKind::accumulate;
  if (dynamic_cast<RecvNode*>(node) != nullptr) return NodeKind::recv;
  return NodeKind::plain;  // any other sink just runs
}

}  // namespace

Plan::Plan(std::vector<Edge> roots, std::vector<NodePtr> sends, std::optional<LeafSet> inputs)
    : kept_roots_(std::move(roots)), kept_sends_(std::move(sends)), inputs_(std::move(inputs)) {
  links_.reserve(kept_sends_.size());
  indices_.reserve(2 * kept_sends_.size());
  for (const NodePtr& send : kept_sends_) {
    const std::uint32_t index = walk(send.get());
    if (kinds_[index] == NodeKind::send) continue;
    kinds_[index] = NodeKind::send;
    sends_.push_back(index);
    links_.emplace(static_cast<SendNode&>(*send).link(), index);
  }
  for (const Edge& root : kept_roots_) roots_.push_back({walk(root.function.get()), root.input_nr});

  // The walk numbered the nodes; rows need their final order, so edges are laid out in a second
  // sweep.
  const std::uint32_t count = size();
  pending_.assign(count, 0);
  offsets_.resize(count + 1);
  for (std::uint32_t i = 0; i < count; ++i) {
    offsets_[i] = static_cast<std::uint32_t>(targets_.size());
    if (!trimmed(i)) ++untrimmed_;
    for (const Edge& edge : nodes_[i]->next_edges()) {
      if (!edge.is_valid()) {
        targets_.push_back({});
        continue;
      }
      const std::uint32_t target = indices_.find(edge.function.get())->second;
      if (trimmed(target)) {
        targets_.push_back({});
        continue;
      }
      targets_.push_back({target, edge.input_nr});
      ++pending_[target];
    }
    if (kinds_[i] == NodeKind::send) ++pending_[i];
  }
  offsets_[count] = static_cast<std::uint32_t>(targets_.size());
  indices_ = {};
}

std::uint32_t Plan::find(LinkId link) const noexcept {
  const auto found = links_.find(link);
  return found == links_.end() ? kNone : found->second;
}

std::uint32_t Plan::add(Node* node) {
  const auto index = size();
  nodes_.push_back(node);
  kinds_.push_back(kind_of(node));
  std::uint8_t leads_to = 0;
  if (kinds_.back() == NodeKind::recv) {
    leads_to = kToRecv;
  } else if (kinds_.back() == NodeKind::accumulate && inputs_ &&
             inputs_->contains(
                 static_cast<AccumulateGrad*>(node)->variable.unsafeGetTensorImpl())) {
    leads_to = kToInput;
  }
  leads_to_.push_back(leads_to);
  const std::uint16_t device = add_device(*node);
  if (device != 0 && device_of_.empty()) device_of_.resize(index);
  if (!other_devices_.empty()) device_of_.push_back(device);
  indices_.emplace(node, index);
  return index;
}

std::uint16_t Plan::add_device(const Node& node) {
  for (std::uint32_t i = 0; i < node.num_inputs(); ++i) {
    const c10::Device device = node.input_metadata(i).device();
    if (device.is_cpu() || !is_queued(device)) continue;
    const auto known = std::find(other_devices_.begin(), other_devices_.end(), device);
    const auto before = known - other_devices_.begin();
    if (known == other_devices_.end()) other_devices_.push_back(device);
    return static_cast<std::uint16_t>(before + 1);
  }
  return 0;
}

// Depth first with an explicit stack: graphs are deeper than thread stacks. A node is finished
// after all its targets, which is when it is known where it leads.
std::uint32_t Plan::walk(Node* start) {
  if (const auto seen = indices_.find(start); seen != indices_.end()) return seen->second;
  struct Frame {
    std::uint32_t node;
    std::uint32_t next;
  };
  const std::uint32_t first = add(start);
  std::vector<Frame> stack{{first, 0}};
  while (!stack.empty()) {
    Frame& frame = stack.back();
    const edge_list& edges = nodes_[frame.node]->next_edges();
    if (frame.next == edges.size()) {
      const std::uint32_t done = frame.node;
      stack.pop_back();
      if (!stack.empty()) leads_to_[stack.back().node] |= leads_to_[done];
      continue;
    }
    Node* target = edges[frame.next++].function.get();
    if (target == nullptr) continue;
    if (const auto seen = indices_.find(target); seen != indices_.end()) {
      leads_to_[frame.node] |= leads_to_[seen->second];
    } else {
      stack.push_back({add(target), 0});
    }
  }
  return first;
}

void Marks::spread(std::uint32_t source, std::vector<std::uint32_t>& recvs) {
  const auto visit = [this](std::uint32_t index) {
    if (marked_[index] != 0) return;
    marked_[index] = 1;
    stack_.push_back(index);
  };
  visit(source);
  while (!stack_.empty()) {
    const std::uint32_t index = stack_.back();
    stack_.pop_back();
    if (plan_.kind(index) == NodeKind::recv) recvs.push_back(index);
    for (const Plan::Target& target : plan_.edges(index)) {
      if (target.node != Plan::kNone) visit(target.node);
    }
  }
}

}  // namespace stitch::dist_autograd
