#pragma once

#include <optional>

#include "stitch/rpc/agent/shutdown_protocol.h"
#include "stitch/rpc/calls/report.h"

namespace stitch::rpc {

class Agent;

// Appends what this layer and the extensions of `agent` have for `page`: members, threads that
// wait, the pool, a shutdown under way; calls made and served; barriers and all_gathers; the event
// ring. Needs no user-function thread; takes the locks of the tables one after the other, briefly,
// so it is a picture of a moment but not of one instant. Any thread; after start().
void report(Agent& agent, Page page, Report& report);
// The table of a shutdown: a row for each worker that it waits for. Any thread; after start().
[[nodiscard]] Table shutdown_table(Agent& agent,
                                   const std::optional<ShutdownProtocol::AwaitedWorkers>& waiting);

}  // namespace stitch::rpc
