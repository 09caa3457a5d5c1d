#pragma once

#include <c10/core/DeviceGuard.h>

#include <exception>

#include "stitch/base/error.h"
#include "stitch/rpc/gpu/device_gate.h"
#include "stitch/transport/gpu/gpu_libraries.h"

namespace stitch::rpc {

// Returns what `ask` does, which calls CUDA for streams and events of that device, on any thread of
// the program. Creates no context elsewhere: libtorch goes back to the thread's device after each
// call, on which that may have none yet. Ends no capture of a graph by another thread. Throws Error
// naming the device where `ask` throws.
template <class F>
auto on_device(c10::Device device, F ask) {
  try {
    const c10::DeviceGuard on(device);
    // Within the guard: to change the mode may need a context.
    const transport::gpu::RelaxedCapture relaxed(transport::gpu::GpuLibraries::of_process().cuda());
    return ask();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& exception) {
    throw device_error("device " + device.str() + " has failed", exception);
  }
}

}  // namespace stitch::rpc
