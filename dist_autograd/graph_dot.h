#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "stitch/dist_autograd/context_state.h"

namespace stitch::rpc {
class Agent;
}  // namespace stitch::rpc

namespace stitch::dist_autograd {

// The autograd graph of a context over all workers that took part, as Graphviz: one cluster per
// worker, links between workers as dashed edges from a recv node to its send node. Asks all
// workers one after the other and waits; throws the error of one that does not answer.
[[nodiscard]] std::string collect_graph(const std::shared_ptr<rpc::Agent>& agent,
                                        const ContextState& context,
                                        const std::vector<at::Tensor>& roots);

}  // namespace stitch::dist_autograd
