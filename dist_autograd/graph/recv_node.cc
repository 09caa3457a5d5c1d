#include "stitch/dist_autograd/graph/recv_node.h"

#include <cstdint>
#include <utility>

#include "stitch/base/error.h"

namespace stitch::dist_autograd {

namespace {

// One tensor of a message that brought several. Identity. In recycled memory.
class ReceivedTensor final : public Node {
 public:
  ReceivedTensor(const NodePtr& message, std::uint32_t input) {
    set_next_edges({Edge(message, input)});
  }
  [[nodiscard]] static void* operator new(std::size_t bytes) { return base::take_recycled(bytes); }
  static void operator delete(void* at, std::size_t bytes) noexcept { base::recycle(at, bytes); }
  std::string name() const override { return "ReceivedTensor"; }

 private:
  variable_list apply(variable_list&& gradients) override {
    const Edge& behind = next_edge(0);
    static_cast<const RecvNode&>(*behind.function).check_shape(behind.input_nr, gradients.at(0));
    return std::move(gradients);
  }
};

}  // namespace

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
  if (tensors.size() == 1) return torch::autograd::set_history(tensors[0], node);
  for (at::Tensor& tensor : tensors) {
    const std::uint32_t input = node->add_input_metadata(tensor);
    torch::autograd::set_history(tensor, make_node<ReceivedTensor>(node, input));
  }
}

void RecvNode::check_shape(std::size_t input, const at::Tensor& gradient) const {
  const auto& metadata = input_metadata(input);
  if (!gradient.defined() || metadata.is_same_shape(gradient)) return;
  throw Error(ErrorCode::remote_exception,
              "a hook of a received tensor (" + call() + ") returned an " +
                  metadata.incompatible_shape_error_message(input, gradient).str());
}

variable_list RecvNode::apply(variable_list&&) {
  throw Error(ErrorCode::invalid_argument, "backward reached a tensor that came from " +
                                               stitch::to_string(sender_) + " (" + call() +
                                               "): the local engine cannot follow it there; call "
                                               "backward() of the dist_autograd::Context instead");
}

}  // namespace stitch::dist_autograd
