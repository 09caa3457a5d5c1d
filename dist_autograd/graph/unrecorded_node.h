#pragma once

#include <string>
#include <utility>

#include "stitch/dist_autograd/graph/compat.h"

namespace stitch::dist_autograd {

// The grad_fn of a tensor that has history at its sender and came without a context: nothing leads
// from here to that history, and a backward that reaches it must not end as if it were a leaf.
// Owned by the tensor. Immutable.
class UnrecordedNode final : public Node {
 public:
  explicit UnrecordedNode(std::string sender) : sender_(std::move(sender)) {}
  // Makes `tensor` (a leaf, floating or complex) the result of such a node.
  static void attach(at::Tensor& tensor, std::string sender);
  std::string name() const override { return "UnrecordedNode"; }

 private:
  // Throws Error(invalid_argument).
  variable_list apply(variable_list&& gradients) override;

  const std::string sender_;
};

}  // namespace stitch::dist_autograd
