#pragma once

#include <memory>

#include "stitch/rpc/agent/incoming_call.h"
#include "stitch/rpc/given_arguments.h"
#include "stitch/rref/carried_refs.h"
#include "stitch/rref/rref_agent.h"

namespace stitch::rref {

// Gets the objects that references among the arguments of `call` stand for: waits until each has
// been created and takes it if this worker owns it, else a copy from its owner. No thread waits.
// Then fills `given` and calls `then`, on any thread. If an object cannot be had, the call fails
// with that error and `then` is destroyed; if the call is cancelled or its deadline passes, the
// requests to owners are abandoned. `refs` and `given` are attachments of the call.
void resolve_arguments(const std::shared_ptr<RRefAgent>& rrefs,
                       const std::shared_ptr<rpc::IncomingCall>& call, const IncomingRefs& refs,
                       rpc::GivenArguments& given, base::UniqueFunction<void()> then);

}  // namespace stitch::rref
