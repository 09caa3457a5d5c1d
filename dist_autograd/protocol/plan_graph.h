#pragma once

#include <memory>

#include "stitch/dist_autograd/executor/plan.h"
#include "stitch/dist_autograd/protocol/pass_protocol.h"

namespace stitch::dist_autograd {

// Throws Error(invalid_argument) when the tensors of `node` were received under another context
// than `context`.
void require_context(const RecvNode& node, const ContextId& context);

// The plan of a pass of `context` as its protocol sees it.
[[nodiscard]] std::unique_ptr<PassGraph> make_pass_graph(std::shared_ptr<const Plan> plan,
                                                         const ContextId& context, WorkerId self);

}  // namespace stitch::dist_autograd
