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

// The autograd graph of a context over all workers that took part, as Graphviz: one cluster and one
// colour per worker; each link as a dashed edge from a recv node to its send node, both in the
// colour of the worker at the other end. What one pass did is written on it: the nodes run and the
// time on each worker, the bytes of gradients on each link; links without any are grey. It is the
// pass that ended last on this worker; where none has, on the first worker asked on which one has.
// A worker on which another one ended last shows nothing of it: the pass did not reach it, or
// another root's has ended there since. The nodes of `roots` have a thick border. Asks all workers
// one after the other and waits; one that does not answer is shown with its error.
[[nodiscard]] std::string collect_graph(const std::shared_ptr<rpc::Agent>& agent,
                                        const ContextState& context,
                                        const std::vector<at::Tensor>& roots);

}  // namespace stitch::dist_autograd
