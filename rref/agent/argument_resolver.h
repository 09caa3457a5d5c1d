#pragma once

#include <memory>

#include "stitch/rpc/calls/incoming_call.h"
#include "stitch/rpc/given_arguments.h"
#include "stitch/rref/agent/carried_refs.h"
#include "stitch/rref/agent/rref_agent.h"

namespace stitch::rref {

// Gets the objects that references among the arguments of `call` stand for, once created: itself as
// their owner, else a copy. No thread waits. Then fills `given` and calls `then`, on any thread. An
// object that cannot be had fails the call; its end abandons the requests. `refs` and `given` are
// attachments of the call.
void resolve_arguments(const std::shared_ptr<RRefAgent>& rrefs,
                       const std::shared_ptr<rpc::IncomingCall>& call, const IncomingRefs& refs,
                       rpc::GivenArguments& given, base::UniqueFunction<void()> then);

}  // namespace stitch::rref
