#include "stitch/dist_autograd/executor/nested_backward.h"

#include <torch/csrc/autograd/engine.h>

#include <new>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "stitch/base/mutex.h"
#include "stitch/dist_autograd/executor/node_run.h"
#include "stitch/dist_autograd/graph/recv_node.h"

namespace stitch::dist_autograd {

namespace {

thread_local NestedBackward* current_scope = nullptr;

// Which leaves' `.grad` is in use by a scope, and which leaves are known to outlive nodes. Process
// wide, as leaves are. Thread contract: any thread.
class LeafTable {
 public:
  static LeafTable& of_this_process() {
    static auto* const table = new LeafTable;  // never destroyed: leaves may outlive statics
    return *table;
  }

  // True: `.grad` of the leaf is the caller's until it calls release().
  bool claim(const at::Tensor& leaf) {
    base::MutexLock lock(mutex_);
    const auto* const key = leaf.unsafeGetTensorImpl();
    return !outliving_.contains(key) && claimed_.insert(key).second;
  }

  void release(const at::Tensor& leaf, bool outlives) noexcept {
    base::MutexLock lock(mutex_);
    claimed_.erase(leaf.unsafeGetTensorImpl());
    if (!outlives) return;
    if (outliving_.size() >= next_sweep_) {
      std::erase_if(outliving_, [](const auto& each) { return each.second.expired(); });
      next_sweep_ = 2 * outliving_.size() + kFirstSweep;
    }
    try {
      outliving_.emplace(leaf.unsafeGetTensorImpl(), leaf.getIntrusivePtr());
    } catch (const std::bad_alloc&) {
      // Then that is found out once more.
    }
  }

 private:
  // Keeps the address of a dead leaf from being used again, but not its memory.
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  static constexpr std::size_t kFirstSweep = 1024;

  base::Mutex mutex_;
  std::unordered_set<const c10::TensorImpl*> claimed_ STITCH_GUARDED_BY(mutex_);
  std::unordered_map<const c10::TensorImpl*, Weak> outliving_ STITCH_GUARDED_BY(mutex_);
  std::size_t next_sweep_ STITCH_GUARDED_BY(mutex_) = kFirstSweep;
};

// The edges into all leaves behind `roots`. Throws what a RecvNode throws in libtorch's engine when
// one is there.
edge_list leaves_behind(const edge_list& roots) {
  edge_list leaves;
  std::unordered_set<const Node*> seen;
  std::vector<Node*> stack;
  const auto visit = [&](const Edge& edge) {
    if (!edge.is_valid() || !seen.insert(edge.function.get()).second) return;
    Node* const node = edge.function.get();
    if (node->num_outputs() != 0) {
      stack.push_back(node);
    } else if (dynamic_cast<AccumulateGrad*>(node) != nullptr) {
      leaves.push_back(edge);
    } else if (dynamic_cast<RecvNode*>(node) != nullptr) {
      static_cast<void>((*node)({}));
    }
  };
  for (const Edge& root : roots) visit(root);
  while (!stack.empty()) {
    const Node* const node = stack.back();
    stack.pop_back();
    for (const Edge& edge : node->next_edges()) visit(edge);
  }
  return leaves;
}

// Libtorch's engine, with the one difference that a backward inside a NestedBackward captures the
// gradients of leaves instead of adding them to `.grad`.
class CapturingEngine final : public torch::autograd::Engine {
 public:
  explicit CapturingEngine(torch::autograd::Engine& inner) : inner_(inner) {}

  variable_list execute(const edge_list& roots, const variable_list& inputs, bool keep_graph,
                        bool create_graph, bool accumulate_grad,
                        const edge_list& outputs = {}) override {
    NestedBackward* const scope = accumulate_grad ? NestedBackward::current() : nullptr;
    if (scope == nullptr)
      return inner_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
    const edge_list wanted = outputs.empty() ? leaves_behind(roots) : outputs;
    if (wanted.empty())
      return inner_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
    variable_list gradients =
        inner_.execute(roots, inputs, keep_graph, create_graph, /*accumulate_grad=*/false, wanted);
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (auto* const leaf = dynamic_cast<AccumulateGrad*>(wanted[i].function.get()))
        scope->add(*leaf, std::move(gradients[i]), create_graph);
    }
    return {};
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return inner_.make_anomaly_metadata();
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return inner_.get_default_saved_variable_hooks();
  }

 private:
  torch::autograd::Engine& inner_;
};

// Puts a CapturingEngine before the engine that is libtorch's default now. Never destroyed, as that
// one is not.
CapturingEngine& capturing_engine() {
  static CapturingEngine* const engine =
      new CapturingEngine(torch::autograd::Engine::get_default_engine());
  return *engine;
}

void install_capturing_engine() {
  static const bool installed = [] {
    capturing_engine();
    torch::autograd::set_default_engine_stub(
        []() -> torch::autograd::Engine& { return capturing_engine(); });
    return true;
  }();
  static_cast<void>(installed);
}

}  // namespace

NestedBackward::NestedBackward(const GradientSink& sink)
    : outer_(std::exchange(current_scope, this)), sink_(sink) {
  install_capturing_engine();
}

NestedBackward::~NestedBackward() {
  current_scope = outer_;
  for (Borrowed& borrowed : borrowed_) give_back(borrowed, false);
}

NestedBackward* NestedBackward::current() noexcept {
  // A message that is handled here while the node waits is not part of the node.
  const bool here =
      current_scope != nullptr && current_scope->callbacks_ == base::CallbackScope::depth();
  return here ? current_scope : nullptr;
}

void NestedBackward::finish() {
  std::vector<Borrowed> borrowed;
  borrowed.swap(borrowed_);
  auto each = borrowed.begin();
  try {
    for (; each != borrowed.end(); ++each) give_back(*each, true);
  } catch (...) {  // that one's sum could not be added
    for (++each; each != borrowed.end(); ++each) give_back(*each, false);
    throw;
  }
}

void NestedBackward::add(AccumulateGrad& leaf, at::Tensor gradient, bool create_graph) {
  const at::AutoGradMode mode(create_graph);
  variable_list inputs{std::move(gradient)};
  for (const auto& hook : leaf.pre_hooks()) inputs = (*hook)(inputs);
  const at::Tensor variable = leaf.variable;
  if (inputs[0].defined()) {
    require_leaf(variable);
    if (variable.requires_grad()) {
      leaf_hooks(leaf, variable, inputs[0]);
      keep(variable, inputs[0], create_graph);
    }
  }
  for (const auto& hook : leaf.post_hooks()) static_cast<void>((*hook)({}, inputs));
}

void NestedBackward::keep(const at::Tensor& leaf, at::Tensor gradient, bool create_graph) {
  const bool wanted = sink_.wants(leaf);
  Borrowed* borrowed = nullptr;
  for (Borrowed& each : borrowed_) {
    if (each.leaf.is_same(leaf)) borrowed = &each;
  }
  if (borrowed == nullptr) {
    borrowed = &borrowed_.emplace_back();  // before the claim, which must not be lost
    if (!LeafTable::of_this_process().claim(leaf)) {
      borrowed_.pop_back();
      if (wanted) sink_.store.accumulate(leaf, std::move(gradient));
      return;
    }
    *borrowed = Borrowed{leaf, leaf.grad(), {}, create_graph};
  }
  borrowed->create_graph |= create_graph;
  if (wanted) accumulate(borrowed->sum, at::Tensor(gradient));
  // Not in place: what `.grad` was before is kept.
  accumulate(leaf.mutable_grad(), std::move(gradient));
}

// Throws only when the sum cannot be added; everything is given back by then.
void NestedBackward::give_back(Borrowed& borrowed, bool keep_sum) {
  if (!borrowed.leaf.defined()) return;  // there was no memory to claim it
  // Nothing else refers to a leaf that the node made for itself.
  const bool outlives = borrowed.leaf.use_count() > 1;
  if (outlives) borrowed.leaf.mutable_grad() = std::move(borrowed.grad_before);
  LeafTable::of_this_process().release(borrowed.leaf, outlives);
  if (!outlives || !keep_sum) return;
  const at::AutoGradMode mode(borrowed.create_graph);
  sink_.store.accumulate(borrowed.leaf, std::move(borrowed.sum));
}

}  // namespace stitch::dist_autograd
