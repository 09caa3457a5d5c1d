#pragma once

namespace stitch::rpc {

// Work without tensors on devices in its request runs under default streams. Each function concerns
// the calling thread's current streams, of all CUDA devices on which these are not the default
// ones, but for devices that are lost; nothing waits on the host. Thread contract: any thread.

// Default streams run what is queued from now on after what the current streams have now.
void default_streams_wait_for_current();
// The current streams run what is queued from now on after what the default streams have now.
void current_streams_wait_for_default();

}  // namespace stitch::rpc
