#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "stitch/base/recycler.h"
#include "stitch/dist_autograd/graph/compat.h"
#include "stitch/dist_autograd/graph/ids.h"
#include "stitch/dist_autograd/graph/link_name.h"

namespace stitch::dist_autograd {

// The node for tensors that were sent: its edges lead to their part of the autograd graph, and
// backward enters that graph here when the receiver's gradients arrive. Its counterpart at the
// receiver is the RecvNode of the same link. Owned by the context, which keeps it (and the graph)
// until it ends. In recycled memory. Immutable after construction.
class SendNode final : public Node {
 public:
  // `tensors` are those of the message that require grad, in message order; `name` names the
  // message in error texts.
  SendNode(LinkId link, WorkerInfo receiver, LinkName name, const std::vector<at::Tensor>& tensors);
  [[nodiscard]] static void* operator new(std::size_t bytes) { return base::take_recycled(bytes); }
  static void operator delete(void* at, std::size_t bytes) noexcept { base::recycle(at, bytes); }

  [[nodiscard]] LinkId link() const noexcept { return link_; }
  [[nodiscard]] const WorkerInfo& receiver() const noexcept { return receiver_; }
  // The message that made the link, for error texts.
  [[nodiscard]] const LinkName& link_name() const noexcept { return name_; }
  [[nodiscard]] std::string call() const { return name_.text(); }
  std::string name() const override { return "SendNode"; }

 private:
  // Identity: input i is the gradient of the i-th tensor.
  variable_list apply(variable_list&& gradients) override;

  const LinkId link_;
  const WorkerInfo receiver_;
  const LinkName name_;
};

}  // namespace stitch::dist_autograd
