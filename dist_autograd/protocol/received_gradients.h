#pragma once

#include <cstdint>
#include <vector>

#include "stitch/dist_autograd/executor/plan.h"
#include "stitch/dist_autograd/protocol/messages.h"

namespace stitch::dist_autograd {

// A GRADIENTS message as the strand takes it: element i of `gradients` is for SendNode `sends[i]`
// of the plan, one gradient per input, undefined ones included; element i of `unreached` has the
// inputs that the roots do not depend on, and is left out, with those behind it, where there are
// none.
struct ReceivedGradients {
  std::vector<std::uint32_t> sends;
  std::vector<variable_list> gradients;
  std::vector<Positions> unreached{};
};

// Matches the entries of a message from `from` to `self` with the plan and checks them against the
// tensors that were sent. A gradient with a link of its own (create_graph) gets a RecvNode of
// `context`. Throws Error(protocol) naming the call whose gradients do not fit it.
[[nodiscard]] ReceivedGradients match_gradients(const Plan& plan, WorkerId self,
                                                const ContextId& context, const WorkerInfo& from,
                                                const std::vector<wire::GradientEntry>& entries,
                                                std::vector<at::Tensor> tensors);

}  // namespace stitch::dist_autograd
