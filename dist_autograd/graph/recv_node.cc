#include "stitch/dist_autograd/graph/recv_node.h"

#include "stitch/base/error.h"

namespace stitch::dist_autograd {

RecvNode::RecvNode(LinkId link, WorkerInfo sender, ContextId context, LinkName name,
                   std::vector<c10::Device> origins)
    : link_(link),
      sender_(std::move(sender)),
      context_(context),
      name_(std::move(name)),
      origins_(std::move(origins)) {}

void RecvNode::attach(LinkId link, WorkerInfo sender, ContextId context, LinkName name,
                      std::vector<at::Tensor>& tensors, std::vector<c10::Device> origins) {
  const NodePtr node =
      make_node<RecvNode>(link, std::move(sender), context, std::move(name), std::move(origins));
  for (at::Tensor& tensor : tensors) torch::autograd::set_history(tensor, node);
}

variable_list RecvNode::apply(variable_list&&) {
  throw Error(ErrorCode::invalid_argument, "backward reached a tensor that came from " +
                                               stitch::to_string(sender_) + " (" + call() +
                                               "): the local engine cannot follow it there; call "
                                               "backward() of the dist_autograd::Context instead");
}

}  // namespace stitch::dist_autograd
