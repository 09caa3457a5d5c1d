#include "stitch/dist_autograd/executor/node_table.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace stitch::dist_autograd {

NodeTable::NodeTable(std::shared_ptr<const Plan> plan)
    : plan_(std::move(plan)),
      inputs_mutexes_(plan_->devices() > 1 ? std::make_unique<base::Mutex[]>(kMutexes) : nullptr),
      slots_(plan_->size()),
      on_devices_(plan_->devices() > 1 ? plan_->size() : 0),
      states_(plan_->size()),
      ready_(plan_->devices()),
      check_(*plan_),
      unresolved_(plan_->untrimmed()) {
  for (std::uint32_t i = 0; i < plan_->size(); ++i) states_[i].pending = plan_->pending(i);
}

void NodeTable::put(std::uint32_t node, std::uint32_t input, at::Tensor gradient) {
  if (!gradient.defined()) return;
  std::optional<base::MutexLock> lock;
  if (inputs_mutexes_) lock.emplace(inputs_mutexes_[node % kMutexes]);
  variable_list& slots = slots_[node];
  if (slots.size() <= input) slots.resize(plan_->node(node).num_inputs());
  if (inputs_mutexes_ && is_on_device(gradient)) {
    on_devices_.add(plan_->node(node), node, input, slots[input], std::move(gradient));
  } else {
    accumulate(slots[input], std::move(gradient));
  }
}

// A root with incoming edges waits for them like any other node; the others are ready now.
void NodeTable::start_roots() {
  for (const Plan::Target& root : plan_->roots()) {
    check_.starts(root.node);
    State& state = states_[root.node];
    if (state.pending != 0 || plan_->trimmed(root.node)) continue;
    state.pending = 1;  // several roots may meet in one node: it becomes ready once
    deliver(root, Reach::live);
    state.pending = Plan::kNone;
  }
}

void NodeTable::on_message(std::uint32_t send, Reach reach, Positions unreached) {
  if (!unreached.empty() && reach == Reach::live)
    unreached_tensors_.emplace(send, std::move(unreached));
  check_.arrives(send);
  deliver({send, 0}, reach);
}

void NodeTable::note_reach(const Plan::Target& target, Reach reach) {
  State& state = states_[target.node];
  state.reach = std::max(state.reach, reach);
  if (reach == Reach::live && plan_->kind(target.node) == NodeKind::recv &&
      plan_->node(target.node).num_inputs() > 1)
    reached_inputs_[target.node].add(target.input);
}

void NodeTable::count(const Plan::Target& target, Reach reach) {
  const std::uint32_t node = target.node;
  check_.delivers(node);
  note_reach(target, reach);
  State& state = states_[node];
  if (--state.pending != 0) return;
  const bool reports = state.reach == Reach::unreached && plan_->kind(node) == NodeKind::recv;
  if (state.reach == Reach::live || reports) {
    make_ready(node);
  } else {
    not_live_.push_back(node);
  }
}

// A node that is complete becomes ready where it is to run, or to report; otherwise its edges are
// followed, in a loop, not by recursion.
void NodeTable::deliver(const Plan::Target& target, Reach reach) {
  count(target, reach);
  while (!not_live_.empty()) {
    const std::uint32_t node = not_live_.back();
    not_live_.pop_back();
    --unresolved_;
    for (const Plan::Target& next : plan_->edges(node)) {
      if (next.node != Plan::kNone) count(next, states_[node].reach);
    }
  }
}

bool NodeTable::has_ready() const {
  return std::any_of(ready_.begin(), ready_.end(),
                     [](const ReadyQueue& queue) { return !queue.empty(); });
}

std::uint32_t NodeTable::take_ready(std::size_t device) {
  const std::uint32_t node = ready_[device].top().node;
  ready_[device].pop();
  return node;
}

void NodeTable::make_ready(std::uint32_t node) {
  const NodeKind kind = plan_->kind(node);
  const std::uint32_t rank = kind == NodeKind::recv         ? 3
                             : plan_->leads_to_recv(node)   ? 2
                             : kind == NodeKind::accumulate ? 1
                                                            : 0;
  ready_[plan_->device_of(node)].push({rank, plan_->node(node).sequence_nr(), node});
}

NodeTable::Inputs NodeTable::take_inputs(std::uint32_t node) {
  check_.runs(node);
  Inputs inputs{std::exchange(slots_[node], {}), on_devices_.take(node)};
  inputs.gradients.resize(plan_->node(node).num_inputs());
  return inputs;
}

// The rest of those that are live.
Positions NodeTable::unreached_inputs(std::uint32_t recv) const {
  Positions unreached;
  const auto inputs = static_cast<std::uint32_t>(plan_->node(recv).num_inputs());
  if (inputs == 1 && states_[recv].reach == Reach::live) return unreached;
  const auto reached = reached_inputs_.find(recv);
  for (std::uint32_t i = 0; i < inputs; ++i) {
    if (reached == reached_inputs_.end() || !reached->second.has(i)) unreached.add(i);
  }
  return unreached;
}

const Positions* NodeTable::unreached_by_message(std::uint32_t send) const {
  const auto found = unreached_tensors_.find(send);
  return found == unreached_tensors_.end() ? nullptr : &found->second;
}

bool NodeTable::resolved() const {
  if (unresolved_ != 0) return false;
  check_.resolved();
  return true;
}

NodeTable::Dropped NodeTable::drop() {
  for (ReadyQueue& queue : ready_) queue = {};
  return {std::exchange(slots_, {}), std::exchange(on_devices_, {})};
}

}  // namespace stitch::dist_autograd
