#include "stitch/dist_autograd/graph/send_node.h"

namespace stitch::dist_autograd {

SendNode::SendNode(LinkId link, WorkerInfo receiver, LinkName name,
                   const std::vector<at::Tensor>& tensors)
    : link_(link), receiver_(std::move(receiver)), name_(std::move(name)) {
  edge_list edges;
  edges.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    edges.push_back(torch::autograd::impl::gradient_edge(tensor));
    add_input_metadata(tensor);
  }
  set_next_edges(std::move(edges));
}

variable_list SendNode::apply(variable_list&& gradients) { return std::move(gradients); }

}  // namespace stitch::dist_autograd
