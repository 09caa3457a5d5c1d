#pragma once

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <type_traits>
#include <utility>

// The only place that knows how versions of libtorch differ. Features are asked for, versions
// never. What must depend on a template parameter does, because `requires` only tests dependent
// expressions softly.
namespace stitch::dist_autograd {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

// Where the functions for handlers of warnings are. A libtorch whose warnings have types has a
// macro for each of them.
#ifdef TORCH_WARN_DEPRECATION
namespace torch_warnings = c10::WarningUtils;
#else
namespace torch_warnings = c10::Warning;
#endif

// How this libtorch owns a node: std::shared_ptr, or an intrusive pointer in later ones.
using NodePtr = std::remove_cvref_t<decltype(std::declval<Edge&>().function)>;
inline constexpr bool kSharedNodes = std::is_same_v<NodePtr, std::shared_ptr<Node>>;

// Makes a node whose destruction does not recurse through a deep graph.
template <class T, class... Args>
[[nodiscard]] auto make_node(Args&&... args) {
  if constexpr (kSharedNodes) {
    return std::shared_ptr<T>(new T(std::forward<Args>(args)...),
                              [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  }
}

// Tensor hooks that run before a node's own pre hooks, where this libtorch keeps them apart (else
// they are pre hooks).
template <class N>
void tensor_pre_hooks(N& node, variable_list& grads) {
  if constexpr (requires { node.tensor_pre_hooks(); }) {
    for (const auto& hook : node.tensor_pre_hooks()) grads = (*hook)(grads);
    for (const auto& retained : node.retains_grad_hooks()) grads = (*retained.second)(grads);
  }
}

// Hooks of a leaf, where this libtorch runs them inside AccumulateGrad (else tensor_pre_hooks() has
// run them).
template <class N>
void leaf_hooks(N& node, const at::Tensor& variable, at::Tensor& grad) {
  if constexpr (!requires { node.tensor_pre_hooks(); }) {
    for (const auto& hook : torch::autograd::impl::hooks(variable)) grad = (*hook)({grad})[0];
  }
}

// Whether the program has hooks on a node, or on the leaf that it is of.
template <class N>
[[nodiscard]] bool has_hooks(N& node) {
  if (!node.pre_hooks().empty() || !node.post_hooks().empty()) return true;
  if constexpr (requires { node.tensor_pre_hooks(); }) {
    return !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty();
  } else if constexpr (std::is_same_v<N, AccumulateGrad>) {
    return !torch::autograd::impl::hooks(node.variable).empty();
  } else {
    return false;
  }
}

// Gives `grad` the dtype that the input described by `metadata` wants.
template <class Metadata>
void fit_dtype(const Metadata& metadata, at::Tensor& grad) {
  auto wanted = c10::typeMetaToScalarType(metadata.options().dtype());
  if constexpr (requires { metadata.grad_dtype(); }) {
    if (metadata.was_default_constructed()) return;
    const auto named = metadata.grad_dtype();
    if (!named.has_value()) return;
    wanted = *named;
  }
  if (grad.scalar_type() != wanted) grad = grad.to(wanted);
}

// True when only `tensor` refers to its memory, so that it may be changed in place, outside
// inference mode too.
[[nodiscard]] inline bool sole_owner(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && !at::isTensorSubclassLike(tensor) &&
         !tensor._is_zerotensor() && !tensor.is_nested() && !tensor.is_inference() &&
         tensor.is_non_overlapping_and_dense() && tensor.use_count() == 1 && tensor.has_storage() &&
         tensor.storage().use_count() == 1;
}

// True when only the tensor itself owns its memory: the condition to take a gradient over without a
// copy.
[[nodiscard]] inline bool owns_memory(const at::Tensor& tensor) {
  if (tensor.layout() == c10::kStrided)
    return tensor.has_storage() && tensor.storage().use_count() == 1;
  if (tensor.layout() != c10::kSparse) return false;
  // Above autograd's part of the dispatch these are views, which own the memory, too.
  const at::AutoDispatchBelowADInplaceOrView parts_themselves;
  const auto owns = [](const at::Tensor& part) {
    return part.use_count() == 2 && part.storage().use_count() == 1;  // the tensor's, and `part`
  };
  return owns(tensor._indices()) && owns(tensor._values());
}

// slot += grad, in place only when no other reference to it exists. An undefined gradient adds
// nothing.
inline void accumulate(at::Tensor& slot, at::Tensor&& grad) {
  if (!grad.defined()) return;
  if (!slot.defined()) {
    slot = std::move(grad);
  } else if (!at::GradMode::is_enabled() && slot.is_sparse() && sole_owner(grad)) {
    slot = std::move(grad.add_(slot));
  } else if (slot.is_sparse() && !grad.is_sparse()) {
    slot = grad + slot;  // dense + sparse is defined, sparse + dense is not
  } else if (!at::GradMode::is_enabled() && sole_owner(slot)) {
    slot.add_(grad);
  } else {
    slot = slot + grad;
  }
}

// Adds `grad` to `kept` by the rules of this libtorch's own AccumulateGrad. `references`: how many
// the caller may hold on `grad` for it to be taken over instead of copied; 0 always copies.
inline void accumulate_leaf(const at::Tensor& variable, at::Tensor& kept, const at::Tensor& grad,
                            std::size_t references) {
  AccumulateGrad::accumulateGrad(variable, kept, grad, references,
                                 [&kept](at::Tensor&& updated) { kept = std::move(updated); });
}

}  // namespace stitch::dist_autograd
