#include "stitch/rpc/gpu/device_kernels.h"

#include "stitch/rpc/future/current_streams.h"
#include "stitch/rpc/gpu/device_bridge.h"
#include "stitch/transport/gpu/kernel_table.h"

namespace stitch::rpc {

const transport::gpu::KernelTable* device_kernels() {
  const DeviceBridge* const bridge = device_bridge();
  if (bridge != nullptr && bridge->kernels != nullptr) return bridge->kernels;
  if (cuda_device_count() <= 0) return nullptr;
  static const transport::gpu::KernelLibrary library =
      transport::gpu::load_kernels(cuda_device_count());
  return library.table;
}

}  // namespace stitch::rpc
