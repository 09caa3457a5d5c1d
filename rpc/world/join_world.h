#pragma once

#include <memory>

#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/options/options.h"

namespace stitch::rpc {

// Meets the other workers at the store that `options` names and returns the running agent, which
// listens where its peers need it to: in the process, on the host, on the network. Blocks for as
// long as init(), with its errors. REQUIRES: options went through resolve_options().
[[nodiscard]] std::shared_ptr<Agent> join_world(Options options);

}  // namespace stitch::rpc
