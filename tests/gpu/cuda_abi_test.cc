// Compares the declarations of cuda_api.h with CUDA's own headers, all at compile time. Built where
// the toolkit is installed.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "stitch/transport/gpu/cuda_api.h"
#include "tests/gpu/called_alike.h"

namespace stitch::transport::gpu::test::cuda_abi_test {
namespace {

#define STITCH_SAME(member, symbol) \
  static_assert(called_alike<decltype(CudaApi::member), decltype(&symbol)>, #symbol);
STITCH_CUDA_RUNTIME_FUNCTIONS(STITCH_SAME)
STITCH_CUDA_DRIVER_FUNCTIONS(STITCH_SAME)
#undef STITCH_SAME
// That what differs is told apart.
static_assert(!called_alike<cuda::Status (*)(int*), decltype(&cudaSetDevice)>);
static_assert(!called_alike<cuda::Status (*)(void*), decltype(&cudaMalloc)>);

static_assert(static_cast<int>(cuda::kSuccess) == cudaSuccess);
static_assert(static_cast<int>(cuda::kInvalidValue) == cudaErrorInvalidValue);
static_assert(static_cast<int>(cuda::kOutOfMemory) == cudaErrorMemoryAllocation);
static_assert(static_cast<int>(cuda::kNotReady) == cudaErrorNotReady);
static_assert(static_cast<int>(cuda::kPeerAccessAlreadyEnabled) ==
              cudaErrorPeerAccessAlreadyEnabled);
static_assert(static_cast<int>(cuda::kIllegalAddress) == cudaErrorIllegalAddress);
static_assert(static_cast<int>(cuda::kLaunchFailure) == cudaErrorLaunchFailure);
static_assert(static_cast<int>(cuda::kHostToDevice) == cudaMemcpyHostToDevice);
static_assert(static_cast<int>(cuda::kDeviceToHost) == cudaMemcpyDeviceToHost);
static_assert(static_cast<int>(cuda::kDeviceToDevice) == cudaMemcpyDeviceToDevice);
static_assert(static_cast<int>(cuda::kCaptureNone) == cudaStreamCaptureStatusNone);
static_assert(static_cast<int>(cuda::kCaptureActive) == cudaStreamCaptureStatusActive);
static_assert(static_cast<int>(cuda::kCaptureGlobal) == cudaStreamCaptureModeGlobal);
static_assert(static_cast<int>(cuda::kCaptureRelaxed) == cudaStreamCaptureModeRelaxed);
static_assert(cuda::kStreamNonBlocking == cudaStreamNonBlocking);
static_assert(cuda::kEventDisableTiming == cudaEventDisableTiming);
static_assert(cuda::kHostAllocPortable == cudaHostAllocPortable);
static_assert(sizeof(cuda::Uuid) == sizeof(CUuuid));

}  // namespace
}  // namespace stitch::transport::gpu::test::cuda_abi_test
