#include "stitch/dist_autograd/graph/unrecorded_node.h"

#include "stitch/base/error.h"

namespace stitch::dist_autograd {

void UnrecordedNode::attach(at::Tensor& tensor, std::string sender) {
  tensor.set_requires_grad(false);
  torch::autograd::set_history(tensor, make_node<UnrecordedNode>(std::move(sender)));
}

variable_list UnrecordedNode::apply(variable_list&&) {
  throw Error(ErrorCode::invalid_argument,
              "backward reached a tensor from worker \"" + sender_ +
                  "\" received without a context: make the Context before the forward pass (in the "
                  "same thread, or with context_scope), or detach() what is only data");
}

}  // namespace stitch::dist_autograd
