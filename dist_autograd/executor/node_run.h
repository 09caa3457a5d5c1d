#pragma once

#include "stitch/dist_autograd/graph/compat.h"
#include "stitch/dist_autograd/graph/gradient_store.h"
#include "stitch/dist_autograd/graph/recv_node.h"
#include "stitch/dist_autograd/graph/send_node.h"

namespace stitch::dist_autograd {

// How a pass runs nodes. The same on every worker of the pass.
struct RunFlags {
  bool retain_graph = false;  // keep saved tensors for another pass
  bool create_graph = false;  // gradients are differentiable themselves
  bool anomaly = false;       // the stack of a node that fails is printed; NaN is a failure
  bool only_inputs = false;   // only the leaves that the root worker named get gradients
  bool allow_nan = false;     // in anomaly mode, too
};

// Running one node with complete inputs, by the rules the local engine keeps (hooks, validation,
// release, NaN check). Each throws what the node or a hook throws, and when one of them calls
// backward() of libtorch's engine. REQUIRES: grad mode is set to flags.create_graph; no lock of
// ours is held.

// Runs a node and returns one gradient per next edge, fitted to what the edge's target expects;
// undefined ones stay so.
[[nodiscard]] variable_list run_node(Node& node, variable_list inputs, const RunFlags& flags);
// The same for a send node, which passes on what it gets: NaN in that is not its doing.
[[nodiscard]] variable_list run_send(SendNode& node, variable_list gradients,
                                     const RunFlags& flags);
// Runs a leaf: its gradient is added to `store`, `.grad` stays as it is.
void run_leaf(AccumulateGrad& leaf, variable_list inputs, GradientStore& store);
// Runs the hooks of a recv node and returns the gradients to send.
[[nodiscard]] variable_list run_recv(RecvNode& node, variable_list inputs);

// Throws when a tensor that was a leaf has become part of the graph (changed in place).
void require_leaf(const at::Tensor& leaf);

// Fits each gradient to the input its edge leads to: sums it down to a broadcast shape, converts
// dtype, moves 0-dim ones to the device. Throws Error(remote_exception) naming `node`, which made
// them, when it cannot fit.
void fit_to_edges(const edge_list& edges, variable_list& gradients, const Node& node);

}  // namespace stitch::dist_autograd
