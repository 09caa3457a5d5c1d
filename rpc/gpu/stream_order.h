#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace stitch::rpc {

// Has `later` run what is queued from now on after what `earlier`, of the same CUDA device, has
// now. Ends no capture of a graph by another thread. Throws Error naming the device when that has
// failed. Thread contract: any thread.
void order(const c10::Stream& earlier, const c10::Stream& later);

// Whether the device is lost to this process until it is restarted, as after an illegal access: it
// is asked once more. Not where memory is short or a capture forbids to ask. Thread contract: any
// thread.
[[nodiscard]] bool is_lost(c10::Device device) noexcept;

}  // namespace stitch::rpc
