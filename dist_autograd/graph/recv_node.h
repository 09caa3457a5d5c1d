#pragma once

#include <memory>
#include <string>
#include <vector>

#include "stitch/dist_autograd/graph/compat.h"
#include "stitch/dist_autograd/graph/ids.h"

namespace stitch::dist_autograd {

// Stands where tensors reached this worker: it is their grad_fn, and a sink of the local graph.
// When backward reaches it, the gradients go to the SendNode of the same link at the sender. Owned
// by the tensors made from it; it holds nothing back. Immutable once the tensors are handed to the
// user.
class RecvNode final : public Node {
 public:
  RecvNode(LinkId link, WorkerInfo sender, ContextId context, std::string call);

  [[nodiscard]] LinkId link() const noexcept { return link_; }
  [[nodiscard]] const WorkerInfo& sender() const noexcept { return sender_; }
  [[nodiscard]] const ContextId& context() const noexcept { return context_; }
  [[nodiscard]] const std::string& call() const noexcept { return call_; }
  std::string name() const override { return "RecvNode"; }

  // Makes a new RecvNode the grad_fn of `tensors` (leaves without history, floating or complex), in
  // this order.
  static void attach(LinkId link, WorkerInfo sender, ContextId context, std::string call,
                     std::vector<at::Tensor>& tensors);

 private:
  // Reached only by libtorch's own engine, which cannot leave the worker. Throws
  // Error(invalid_argument).
  variable_list apply(variable_list&& gradients) override;

  const LinkId link_;
  const WorkerInfo sender_;
  const ContextId context_;
  const std::string call_;
};

}  // namespace stitch::dist_autograd
