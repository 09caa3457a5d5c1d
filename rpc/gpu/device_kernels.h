#pragma once

#include <c10/core/Device.h>

#include <map>

#include "stitch/transport/gpu/kernels/kernel_abi.h"

namespace stitch::rpc {

// The kernels for tensors on a CUDA device: those of the DeviceBridge where it has some (tests),
// else those of libstitch_kernels.so, which is loaded by the first call. Null where there are none,
// or where the device cannot run them, for want of code for its architecture, say, which the first
// call for that device finds out: then libtorch's operators do the work. Thread contract: any
// thread.
[[nodiscard]] const transport::gpu::KernelTable* device_kernels(c10::Device device);

// What a function of device_kernels(device) has returned. True if it says that the device cannot
// run the kernels after all: nothing was done, and they are left out on that device from now on.
[[nodiscard]] bool kernels_cannot_run(c10::Device device, int status);

// The devices that have been asked for in vain so far, with the cudaError_t that they gave; -1: the
// library was not found, or is refused.
[[nodiscard]] std::map<c10::DeviceIndex, int> kernels_left_out();

}  // namespace stitch::rpc
