#pragma once

#include <cstdint>

#include "stitch/dist_autograd/protocol/messages.h"
#include "stitch/rpc/agent/agent.h"

namespace stitch::dist_autograd {

// What control frames have in common. Thread contract: any thread.

// ABORT: the pass of `header` and its context have failed with `error`. A text that would not fit a
// frame is cut.
void send_abort(rpc::Agent& agent, const WorkerInfo& to, const wire::PassHeader& header,
                const Error& error);

// Whether that life of `worker` is the present one; false if it is over. Throws Error(protocol) if
// it never was in this world; `what` names it.
[[nodiscard]] bool require_life(rpc::Agent& agent, WorkerId worker, std::uint64_t epoch,
                                const char* what);

}  // namespace stitch::dist_autograd
