#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "stitch/base/recycler.h"
#include "stitch/dist_autograd/graph/compat.h"
#include "stitch/dist_autograd/graph/ids.h"
#include "stitch/dist_autograd/graph/link_name.h"

namespace stitch::dist_autograd {

// What tensors that were received came from, a sink of the local graph. When backward reaches it,
// the gradients are sent to the SendNode of the same link at the sender. The grad_fn of a tensor
// that came alone; of several, each has a node of its own in front of it, so that the hooks of a
// tensor run only where it is used. Owned by those tensors; owns no tensors or nodes. In recycled
// memory. Immutable once the user has the tensors.
class RecvNode final : public Node {
 public:
  // `origins`: where its tensors were at the sender, by input; empty when all were on the CPU, as
  // here.
  RecvNode(LinkId link, WorkerInfo sender, ContextId context, LinkName name,
           std::vector<c10::Device> origins = {});
  [[nodiscard]] static void* operator new(std::size_t bytes) { return base::take_recycled(bytes); }
  static void operator delete(void* at, std::size_t bytes) noexcept { base::recycle(at, bytes); }

  [[nodiscard]] LinkId link() const noexcept { return link_; }
  [[nodiscard]] const WorkerInfo& sender() const noexcept { return sender_; }
  [[nodiscard]] const ContextId& context() const noexcept { return context_; }
  // The message that made the link, for error texts.
  [[nodiscard]] const LinkName& link_name() const noexcept { return name_; }
  [[nodiscard]] std::string call() const { return name_.text(); }
  // Where the gradient of an input belongs at the sender; nothing for a CPU tensor of both ends.
  [[nodiscard]] std::optional<c10::Device> origin(std::size_t input) const {
    return origins_.empty() ? std::nullopt : std::optional(origins_.at(input));
  }
  std::string name() const override { return "RecvNode"; }
  // What hooks made of the gradient of an input must still be one of the tensor that came. Throws
  // Error(remote_exception).
  void check_shape(std::size_t input, const at::Tensor& gradient) const;

  // Makes `tensors` (leaves without history, floating or complex) the inputs of a new RecvNode, in
  // this order.
  static void attach(LinkId link, WorkerInfo sender, ContextId context, LinkName name,
                     std::vector<at::Tensor>& tensors, std::vector<c10::Device> origins = {});

 private:
  // Called only by libtorch's own engine, which cannot leave the worker. Throws
  // Error(invalid_argument).
  variable_list apply(variable_list&& gradients) override;

  const LinkId link_;
  const WorkerInfo sender_;
  const ContextId context_;
  const LinkName name_;
  const std::vector<c10::Device> origins_;
};

}  // namespace stitch::dist_autograd
