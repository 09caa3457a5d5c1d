#include "stitch/dist_autograd/roots.h"

#include <c10/core/InferenceMode.h>

#include <sstream>
#include <string>

#include "stitch/base/error.h"
#include "stitch/dist_autograd/executor/node_run.h"

namespace stitch::dist_autograd {

std::vector<at::Tensor> check_roots(const std::vector<at::Tensor>& roots, const Options& options) {
  const auto refuse = [](const std::string& text) {
    throw Error(ErrorCode::invalid_argument, text);
  };
  if (roots.empty()) refuse("backward needs at least one root tensor");
  if (options.grads.size() > roots.size()) {
    refuse("backward got " + std::to_string(options.grads.size()) + " gradients for " +
           std::to_string(roots.size()) + " roots");
  }
  std::vector<at::Tensor> gradients;
  gradients.reserve(roots.size());
  for (std::size_t i = 0; i < roots.size(); ++i) {
    const at::Tensor& root = roots[i];
    const std::string which = "root " + std::to_string(i);
    if (!root.defined()) refuse(which + " is undefined");
    if (!root.requires_grad()) refuse(which + " does not require grad and has no grad_fn");
    at::Tensor gradient = i < options.grads.size() ? options.grads[i] : at::Tensor();
    if (!gradient.defined()) {
      if (root.numel() != 1) {
        std::ostringstream text;
        text << which << " has shape " << root.sizes()
             << ": only a root of one element may leave its gradient out";
        refuse(text.str());
      }
      const c10::InferenceMode off(false);  // nodes run outside of it
      gradient = at::ones_like(root, at::MemoryFormat::Preserve).detach();
    } else if (gradient.sizes() != root.sizes()) {
      std::ostringstream text;
      text << which << " has shape " << root.sizes() << ", its gradient " << gradient.sizes();
      refuse(text.str());
    } else if (gradient.scalar_type() != root.scalar_type()) {
      refuse(which + " has dtype " + c10::toString(root.scalar_type()) + ", its gradient " +
             c10::toString(gradient.scalar_type()));
    } else if (gradient.device() != root.device()) {
      refuse(which + " is on device " + root.device().str() + ", its gradient on " +
             gradient.device().str());
    }
    gradients.push_back(std::move(gradient));
  }
  return gradients;
}

void check_inputs(const std::vector<at::Tensor>& inputs) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const auto refuse = [i](const char* text) {
      throw Error(ErrorCode::invalid_argument, "input " + std::to_string(i) + text);
    };
    if (!inputs[i].defined()) refuse(" is undefined");
    if (!inputs[i].requires_grad()) refuse(" does not require grad");
    if (!inputs[i].is_leaf())
      refuse(" is not a leaf: it is a result (of an operation or a call), which gets no gradient");
  }
}

LeafSet leaf_set(const std::vector<at::Tensor>& leaves) {
  LeafSet set;
  for (const at::Tensor& leaf : leaves) set.insert(leaf.unsafeGetTensorImpl());
  return set;
}

}  // namespace stitch::dist_autograd
