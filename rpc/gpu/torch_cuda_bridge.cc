// The bridge to libtorch's CUDA streams. Compiled wherever the toolkit's headers are; linked, as
// the target stitch_torch_cuda, by programs whose libtorch has CUDA.
#include <c10/cuda/CUDAStream.h>

#include "stitch/rpc/gpu/device_bridge.h"

namespace stitch::rpc {

namespace {

c10::Stream from_raw(void* stream, c10::DeviceIndex device) {
  return c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream), device).unwrap();
}

void* raw(const c10::Stream& stream) { return c10::cuda::CUDAStream(stream).stream(); }

constexpr DeviceBridge kBridge{&from_raw, &raw};
[[maybe_unused]] const bool kInstalled = set_device_bridge(&kBridge);

}  // namespace

}  // namespace stitch::rpc
