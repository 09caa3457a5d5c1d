#include "stitch/dist_autograd/executor/node_run.h"

#include <ATen/record_function.h>

#include <memory>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

#include "stitch/base/callback_scope.h"
#include "stitch/base/error.h"

namespace stitch::dist_autograd {

namespace {

[[noreturn]] void refuse(const std::string& text) {
  throw Error(ErrorCode::remote_exception, text);
}

// Sees whether code of the program, which a node or a hook runs, calls backward() of libtorch's own
// engine: that adds to `.grad` what belongs to the context.
class BackwardWatch {
 public:
  explicit BackwardWatch(bool on) {
    if (!on) return;
    outer_ = std::exchange(innermost_, this);
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&saw).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  }
  ~BackwardWatch() {
    if (!handle_) return;
    at::removeCallback(*handle_);
    innermost_ = outer_;
  }
  BackwardWatch(const BackwardWatch&) = delete;
  BackwardWatch& operator=(const BackwardWatch&) = delete;
  // Throws when it has.
  void expect_none() const {
    if (seen_)
      refuse(
          "backward() was called inside it: call torch::autograd::grad() there, which leaves "
          ".grad alone");
  }

 private:
  // Only backward() runs such a node; grad() captures what would reach it. What a message that is
  // handled here meanwhile runs is not the node's.
  static std::unique_ptr<at::ObserverContext> saw(const at::RecordFunction& function) {
    if (innermost_ != nullptr && innermost_->callbacks_ == base::CallbackScope::depth() &&
        std::string_view(function.name()) == "torch::autograd::AccumulateGrad")
      innermost_->seen_ = true;
    return nullptr;
  }
  static inline thread_local BackwardWatch* innermost_ = nullptr;

  const int callbacks_ = base::CallbackScope::depth();
  BackwardWatch* outer_ = nullptr;
  std::optional<at::CallbackHandle> handle_;
  bool seen_ = false;
};

void pre_hooks(Node& node, variable_list& inputs) {
  tensor_pre_hooks(node, inputs);
  for (const auto& hook : node.pre_hooks()) inputs = (*hook)(inputs);
}

variable_list post_hooks(Node& node, variable_list outputs, const variable_list& inputs) {
  const std::size_t count = outputs.size();
  for (const auto& hook : node.post_hooks()) outputs = (*hook)(outputs, inputs);
  if (outputs.size() != count) {
    refuse("a post hook of " + node.name() + " returned " + std::to_string(outputs.size()) +
           " gradients instead of " + std::to_string(count));
  }
  return outputs;
}

// What hooks made of the gradients must still be gradients of the tensors that came.
void refuse_other_shapes(const RecvNode& node, const variable_list& gradients) {
  if (gradients.size() != node.num_inputs()) {
    refuse("a hook of a received tensor (" + node.call() + ") returned " +
           std::to_string(gradients.size()) + " gradients instead of " +
           std::to_string(node.num_inputs()));
  }
  for (std::size_t i = 0; i < gradients.size(); ++i) node.check_shape(i, gradients[i]);
}

void refuse_nan(const Node& node, const variable_list& outputs) {
  const at::AutoGradMode off(false);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].defined()) continue;
    const c10::OptionalDeviceGuard device(outputs[i].device());
    const at::Tensor values = outputs[i].is_sparse() ? outputs[i]._values() : outputs[i];
    if (at::isnan(values).any().item<bool>())
      refuse("Function '" + node.name() + "' returned nan values in its " + std::to_string(i) +
             "th output.");
  }
}

}  // namespace

void fit_to_edges(const edge_list& edges, variable_list& gradients, const Node& node) {
  const auto who = [&node] { return "function " + node.name(); };
  if (gradients.size() != edges.size()) {
    refuse(who() + " returned " + std::to_string(gradients.size()) + " gradients, expected " +
           std::to_string(edges.size()));
  }
  for (std::size_t i = 0; i < edges.size(); ++i) {
    at::Tensor& gradient = gradients[i];
    if (!edges[i].is_valid() || !gradient.defined()) continue;
    const auto& metadata = edges[i].function->input_metadata(edges[i].input_nr);
    if (!metadata.is_same_shape(gradient)) {
      if (!metadata.is_expandable_to_shape(gradient))
        refuse(who() + " returned an " +
               metadata.incompatible_shape_error_message(i, gradient).str());
      gradient = metadata.reduce_grad(gradient);
    }
    const bool complex_wanted =
        c10::isComplexType(c10::typeMetaToScalarType(metadata.options().dtype()));
    // Integers are cast, as libtorch does it.
    if (!c10::isFloatingType(gradient.scalar_type()) &&
        complex_wanted != c10::isComplexType(gradient.scalar_type())) {
      refuse(who() + " returned an invalid gradient at index " + std::to_string(i) + ": dtype " +
             c10::toString(gradient.scalar_type()) + " for an input of dtype " +
             c10::toString(c10::typeMetaToScalarType(metadata.options().dtype())));
    }
    fit_dtype(metadata, gradient);
    const bool layouts_agree = gradient.layout() == metadata.layout() ||
                               (gradient.is_sparse() && metadata.layout() == c10::kStrided) ||
                               gradient.layout() == c10::kStrided;
    if (!layouts_agree) {
      std::ostringstream text;
      text << who() << " returned an invalid gradient at index " << i << ": layout "
           << gradient.layout() << " for an input of layout " << metadata.layout();
      refuse(text.str());
    }
    if (gradient.device() != metadata.device()) {
      if (gradient.dim() != 0) {
        refuse(who() + " returned an invalid gradient at index " + std::to_string(i) +
               ": on device " + gradient.device().str() + ", expected " + metadata.device().str());
      }
      gradient = gradient.to(metadata.device());
    }
  }
}

variable_list run_send(SendNode& node, variable_list gradients, const RunFlags& flags) {
  if (has_hooks(node)) return run_node(node, std::move(gradients), flags);
  fit_to_edges(node.next_edges(), gradients, node);
  return gradients;
}

variable_list run_node(Node& node, variable_list inputs, const RunFlags& flags) {
  const BackwardWatch watch(!node.is_traceable() || has_hooks(node));  // libtorch's own are
  pre_hooks(node, inputs);
  if (!flags.retain_graph) node.will_release_variables();
  const bool hooked = !node.post_hooks().empty();
  variable_list copies;
  if (hooked)
    copies = inputs;  // only then: an extra reference stops the node from reusing its inputs
  variable_list outputs = node(std::move(inputs));
  fit_to_edges(node.next_edges(), outputs, node);
  if (hooked) outputs = post_hooks(node, std::move(outputs), copies);
  if (!flags.retain_graph) node.release_variables();
  if (flags.anomaly && !flags.allow_nan) refuse_nan(node, outputs);
  watch.expect_none();
  return outputs;
}

void require_leaf(const at::Tensor& leaf) {
  if (!leaf.grad_fn()) return;
  refuse("a leaf tensor was changed in place after its use: it is no longer a leaf of the graph");
}

void run_leaf(AccumulateGrad& leaf, variable_list inputs, GradientStore& store) {
  const BackwardWatch watch(has_hooks(leaf));
  pre_hooks(leaf, inputs);
  const bool hooked = !leaf.post_hooks().empty();
  if (!inputs.empty() && inputs[0].defined()) {
    require_leaf(leaf.variable);
    if (leaf.variable.requires_grad()) {
      at::Tensor gradient = hooked ? inputs[0] : std::move(inputs[0]);
      leaf_hooks(leaf, leaf.variable, gradient);
      watch.expect_none();
      store.accumulate(leaf.variable, std::move(gradient), hooked ? 2 : 1);
    }
  }
  if (hooked) static_cast<void>(post_hooks(leaf, {}, inputs));
  watch.expect_none();
}

variable_list run_recv(RecvNode& node, variable_list inputs) {
  const BackwardWatch watch(has_hooks(node));
  pre_hooks(node, inputs);
  if (!node.post_hooks().empty()) static_cast<void>(post_hooks(node, {}, inputs));
  refuse_other_shapes(node, inputs);
  watch.expect_none();
  return inputs;
}

}  // namespace stitch::dist_autograd
