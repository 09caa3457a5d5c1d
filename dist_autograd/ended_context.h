#pragma once

#include "stitch/base/error.h"
#include "stitch/dist_autograd/graph/ids.h"

namespace stitch::dist_autograd {

// What uses of a context that has ended fail with. Thread contract: any thread.
[[nodiscard]] inline Error ended_error(const ContextId& id) {
  return Error(ErrorCode::cancelled, "context " + to_string(id) + " has ended");
}

}  // namespace stitch::dist_autograd
