#pragma once

#include <c10/core/Stream.h>

#include <cstdint>

#include "stitch/transport/gpu/path_choice.h"

namespace stitch::rpc {

// What the transfers between devices need of libtorch beyond its device-generic interface: streams
// of CUDA as streams of c10, and back. In programs it is torch_cuda_bridge.cc, of the target
// stitch_torch_cuda, which a program that has a libtorch with CUDA links; without one, tensors on
// devices travel through host memory. Thread contract: any thread.
struct DeviceBridge {
  // `stream` is a cudaStream_t of that device, which outlives its use.
  c10::Stream (*from_raw)(void* stream, c10::DeviceIndex device);
  // The cudaStream_t.
  void* (*raw)(const c10::Stream& stream);
  // What a worker of this process passes for, by its id; null: for this process. For tests of paths
  // between processes in one.
  transport::gpu::ProcessIdentity (*identity)(std::uint32_t worker) = nullptr;
};

// Null: there is none. Set by the initialisation of a namespace-scope variable, before any worker
// starts.
[[nodiscard]] const DeviceBridge* device_bridge() noexcept;
// `bridge` must live as long as the process.
bool set_device_bridge(const DeviceBridge* bridge) noexcept;

}  // namespace stitch::rpc
