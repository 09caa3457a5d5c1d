#pragma once

#include <memory>

#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/options/options.h"

namespace stitch::rpc {

// Meets the other workers at the store that `options` names and returns the running agent. Blocks
// for at most options.init_timeout; errors as init(). REQUIRES: options went through
// resolve_options().
//
// Each worker takes a slot (an atomic counter), writes who it is under the slot, and reads
// everybody's: so every worker sees a duplicate name or rank. Then each listens where its peers
// need it to (in process, on this host, on the network), publishes its addresses, and reads
// everybody's. The last one to have read erases the keys: the store is ready for the next world,
// with only the epochs left in it.
[[nodiscard]] std::shared_ptr<Agent> join_world(Options options);

}  // namespace stitch::rpc
