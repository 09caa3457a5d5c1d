#pragma once

#include <functional>

#include "stitch/rpc/agent/agent.h"

namespace stitch::rpc {

// For control frames that are sent once and on which other workers rely: sends what `make` makes. A
// control frame arrives, or its peer is lost and both sides are told; only a lack of memory can
// keep it from being made. Then `make` is called again, after a delay, until it can be sent, the
// peer is lost or this worker has stopped. Throws std::bad_alloc, and it is as if nothing had been
// done, where there is no memory for that either. Any thread.
void send_reliably(Agent& agent, const WorkerInfo& to, const std::function<OutMessage()>& make);

}  // namespace stitch::rpc
