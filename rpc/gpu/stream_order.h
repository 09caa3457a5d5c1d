#pragma once

#include <c10/core/Stream.h>

namespace stitch::rpc {

// Has `later` run what is queued from now on after what `earlier`, of the same CUDA device, has
// now. Ends no capture of a graph by another thread. Thread contract: any thread.
void order(const c10::Stream& earlier, const c10::Stream& later);

}  // namespace stitch::rpc
