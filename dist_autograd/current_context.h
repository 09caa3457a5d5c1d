#pragma once

#include <cstdint>
#include <memory>

#include "stitch/dist_autograd/context_state.h"
#include "stitch/rpc/future/execution_context.h"

namespace stitch::dist_autograd {

// What the execution context of a thread carries for this layer: the current context, the function
// of the call that it came with (its wire id; 0: none), and what was current before it: contexts
// may end in another order than they nest.
struct CurrentContext {
  std::shared_ptr<ContextState> context;
  std::uint64_t function = 0;
  std::shared_ptr<const CurrentContext> outer = nullptr;

  // That of this thread, or null.
  [[nodiscard]] static std::shared_ptr<const CurrentContext> get() {
    return std::static_pointer_cast<const CurrentContext>(
        rpc::ExecutionContext::current().autograd_context);
  }
};

}  // namespace stitch::dist_autograd
