#include "stitch/transport/gpu/kernels/launch.h"
#include "stitch/transport/gpu/kernels/launchers.h"

// The one symbol of the library; see kernel_abi.h.
namespace stitch::transport::gpu::kernels {
namespace {

int load(int device) {
  const DeviceScope scope(device);
  if (scope.status() != cudaSuccess) return scope.status();
  if (const int status = load_pack_kernels()) return status;
  return load_sparse_kernels();
}

const char* describe(int status) {
  switch (status) {
    case kKernelSuccess:
      return "success";
    case kKernelBadOffset:
      return "a packed offset is no multiple of 256, or lies before the end of the last tensor";
    case kKernelBadRange:
      return "the tensors do not fit into the packed buffer";
    case kKernelBadShape:
      return "a size is negative or beyond its limit, or a stride too small";
    case kKernelBadElement:
      return "an element size is 0, or a cast is not from float";
    case kKernelMisaligned:
      return "an address is not aligned to its type";
    case kKernelTooManyDims:
      return "more than 8 dimensions that do not merge";
    case kKernelOverlap:
      return "a tensor to unpack into has a stride of 0";
    case kKernelBadRule:
      return "the rule is unknown, its state is missing, or the step is below 1";
    case kKernelSmallWorkspace:
      return "the workspace is smaller than sparse_workspace() says";
    case kKernelCutShort:
      return "the second kernel of the update was not launched: some rows are stepped, others not";
    default:
      return cudaGetErrorString(static_cast<cudaError_t>(status));
  }
}

constexpr KernelTable kTable{kKernelAbi,       sizeof(KernelTable), pack, unpack,
                             sparse_workspace, sparse_update,       load, describe};

}  // namespace
}  // namespace stitch::transport::gpu::kernels

extern "C" __attribute__((visibility("default"))) const stitch::transport::gpu::KernelTable*
stitch_kernel_table() {
  return &stitch::transport::gpu::kernels::kTable;
}
