#pragma once

#include <memory>

#include "stitch/rpc/future/autocast.h"
#include "stitch/rpc/message/message.h"

namespace stitch::dist_autograd {

// The autocast section of requests: a handler runs under the autocast of its caller. Thread
// contract: any thread.

// Adds this thread's. Throws Error(invalid_argument) for a dtype that has no code.
void add_autocast(rpc::OutMessage& request);
// Null when there is no such section: the caller's is off. Throws Error(protocol) for a damaged
// one, Error(invalid_argument) for an autocast that this version of torch does not have.
[[nodiscard]] std::shared_ptr<const rpc::Autocast> autocast_of(const rpc::InMessage& request);

}  // namespace stitch::dist_autograd
