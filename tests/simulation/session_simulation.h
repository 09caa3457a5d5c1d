#pragma once

#include <cstdint>

#include "tests/simulation/kernel.h"

namespace stitch::rpc::session_simulation {

// Two Sessions over connections that break: messages small and large are sent, passed on, delivered
// and acknowledged in any order that the transports allow; connections end anywhere, are noticed by
// the two sides at different times, and are replaced as PROTOCOL.md, section 6 says. Checked after
// each step: nothing is delivered twice, or out of order where small messages keep theirs; each
// SendDone runs once, and not with success for what never left; a request that is sent again says
// whether its call is over. At the end, over a last connection: everything has been delivered, or
// its sender knows that it never will be, and nothing is kept.
[[nodiscard]] simulation::Outcome run(std::uint64_t number);

}  // namespace stitch::rpc::session_simulation
