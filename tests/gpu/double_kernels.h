#pragma once

#include "stitch/transport/gpu/kernels/kernel_abi.h"

// The kernels of libstitch_kernels.so over the double of CUDA: their own code, run on the host in a
// kernel of the double, which sees what they read and write.
namespace stitch::testing::double_device {

[[nodiscard]] const transport::gpu::KernelTable& kernels();
// How often they have been launched.
[[nodiscard]] int packings();
[[nodiscard]] int row_updates();

}  // namespace stitch::testing::double_device
