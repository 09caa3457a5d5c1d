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

// The autograd graph of a context over all workers that took part, as Graphviz: a cluster and a
// colour for each worker, each link as a dashed edge, and what the pass did that ended last on this
// worker (else on the first worker that has one): nodes, times, bytes. The nodes of `roots` have a
// thick border. Asks the workers one after the other; a worker that does not answer is shown with
// its error.
[[nodiscard]] std::string collect_graph(const std::shared_ptr<rpc::Agent>& agent,
                                        const ContextState& context,
                                        const std::vector<at::Tensor>& roots);

}  // namespace stitch::dist_autograd
