#pragma once

#include <ATen/ThreadLocalState.h>

#include <optional>

#include "stitch/rpc/future/current_streams.h"

namespace stitch::rpc {

// libtorch keeps state per thread: grad mode, inference mode, dispatch keys, guards, and the
// current streams of devices. Callbacks and messages that are handled on a thread of the user must
// not run under that user's guards.
//
// Thread contract: each function and object concerns the calling thread only.

// Whether this thread has the state of a new thread, as far as code that runs on it would notice.
// The first call, that of an Agent's constructor, takes that state from a new thread.
[[nodiscard]] bool has_fresh_torch_state();

// Gives this thread the state of a new thread for a block, on devices in use the default streams.
class FreshTorchState {
 public:
  FreshTorchState();
  FreshTorchState(const FreshTorchState&) = delete;
  FreshTorchState& operator=(const FreshTorchState&) = delete;

 private:
  std::optional<at::ThreadLocalStateGuard> guard_;
  std::optional<StreamSetScope> streams_;
};

}  // namespace stitch::rpc
