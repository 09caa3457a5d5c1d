#pragma once

#include "stitch/transport/gpu/kernels/kernel_abi.h"

namespace stitch::rpc {

// The kernels for tensors on devices: those of the DeviceBridge where it has some (tests), else
// those of libstitch_kernels.so, which is loaded by the first call. Null where there are none: then
// libtorch's operators do the work. Thread contract: any thread.
[[nodiscard]] const transport::gpu::KernelTable* device_kernels();

}  // namespace stitch::rpc
