#pragma once

#include <vector>

#include "stitch/base/callback_scope.h"
#include "stitch/dist_autograd/graph/compat.h"
#include "stitch/dist_autograd/graph/gradient_store.h"

namespace stitch::dist_autograd {

// The scope in which one node of a pass runs. Within it, a backward of libtorch's own engine on the
// same thread (a node that recomputes its forward: checkpointing) brings its gradients here. While
// the node runs they are in `.grad`, where the node may read them. When it has run, those of leaves
// that outlive it (parameters) are moved to the pass's context, and their `.grad` is as before;
// leaves that the node made for itself are gone by then. Every leaf is treated so once: when it is
// known to outlive nodes, its `.grad` is not touched any more. Thread contract: one thread; scopes
// nest. Several threads may meet in one leaf: one of them uses its `.grad`, the others see that the
// leaf outlives them.
class NestedBackward {
 public:
  explicit NestedBackward(const GradientSink& sink);
  // Without finish() (the node has thrown), the gradients are dropped.
  ~NestedBackward();
  NestedBackward(const NestedBackward&) = delete;
  NestedBackward& operator=(const NestedBackward&) = delete;

  // The node has run, and what it made for itself has been destroyed.
  void finish();

  // The innermost scope of this thread, or null.
  [[nodiscard]] static NestedBackward* current() noexcept;
  // A nested backward has found this gradient of a leaf; it may be undefined. Runs the hooks of the
  // leaf that libtorch's engine has not run. `create_graph`: as of that backward.
  void add(AccumulateGrad& leaf, at::Tensor gradient, bool create_graph);

 private:
  struct Borrowed {
    at::Tensor leaf;
    at::Tensor grad_before;
    at::Tensor sum;
    bool create_graph = false;
  };
  void keep(const at::Tensor& leaf, at::Tensor gradient, bool create_graph);
  void give_back(Borrowed& borrowed, bool keep_sum);

  NestedBackward* const outer_;
  const int callbacks_ = base::CallbackScope::depth();
  const GradientSink sink_;
  std::vector<Borrowed> borrowed_;
};

}  // namespace stitch::dist_autograd
