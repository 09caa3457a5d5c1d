#include "stitch/dist_autograd/protocol/received_gradients.h"

#include <utility>

#include "stitch/base/error.h"

namespace stitch::dist_autograd {

namespace {

// The gradients of one entry; moves its tensors out of `tensors`, from `next` on. Adds to
// `unreached` the tensors that the roots do not depend on.
variable_list take_gradients(const SendNode& node, const ContextId& context, const WorkerInfo& from,
                             const wire::GradientEntry& entry, std::vector<at::Tensor>& tensors,
                             std::size_t& next, Positions& unreached) {
  const auto wrong = [&](const char* what) {
    return Error(ErrorCode::protocol,
                 "gradients for " + node.call() + " from " + stitch::to_string(from) + ": " + what);
  };
  if (node.receiver().id != from.id) throw wrong("it was sent to another worker");
  if (entry.count != node.num_inputs()) throw wrong("their number is not that of the tensors sent");
  if (!entry.undefined.below(2 * entry.count) || !entry.differentiable.below(entry.count) ||
      (entry.gradient_link == 0 && !entry.differentiable.empty()))
    throw wrong("it names tensors that were not sent");
  variable_list gradients(entry.count);
  std::vector<at::Tensor> linked;
  for (std::uint32_t i = 0; i < entry.count; ++i) {
    if (entry.undefined.has(i)) {
      if (entry.is_unreached(i)) unreached.add(i);
      if (entry.differentiable.has(i)) throw wrong("it names tensors that were not sent");
      continue;
    }
    if (entry.undefined.has(entry.count + i))
      throw wrong("it says that a gradient is missing, and sends it");
    if (next == tensors.size() || !tensors[next].defined()) throw wrong("tensors are missing");
    gradients[i] = std::move(tensors[next++]);
    if (!node.input_metadata(i).is_same_shape(gradients[i]))
      throw wrong("a shape differs from that of the tensor sent");
    if (gradients[i].requires_grad()) gradients[i].set_requires_grad(false);
    if (entry.differentiable.has(i)) linked.push_back(gradients[i]);
  }
  if (!linked.empty())
    RecvNode::attach({from.id, entry.gradient_link}, from, context, node.link_name().of_gradient(),
                     linked);
  return gradients;
}

}  // namespace

ReceivedGradients match_gradients(const Plan& plan, WorkerId self, const ContextId& context,
                                  const WorkerInfo& from,
                                  const std::vector<wire::GradientEntry>& entries,
                                  std::vector<at::Tensor> tensors) {
  ReceivedGradients received;
  received.sends.reserve(entries.size());
  received.gradients.reserve(entries.size());
  std::size_t next = 0;
  for (const wire::GradientEntry& entry : entries) {
    const std::uint32_t send = plan.find({self, entry.link});
    if (send == Plan::kNone)
      throw Error(ErrorCode::protocol,
                  "a gradient came for a call that is unknown here; is forward still running?");
    received.sends.push_back(send);
    Positions unreached;
    received.gradients.push_back(
        take_gradients(plan.send(send), context, from, entry, tensors, next, unreached));
    if (unreached.empty()) continue;
    received.unreached.resize(received.sends.size());
    received.unreached.back() = std::move(unreached);
  }
  if (next != tensors.size())
    throw Error(ErrorCode::protocol,
                "gradients from " + stitch::to_string(from) + " have more tensors than they name");
  return received;
}

}  // namespace stitch::dist_autograd
