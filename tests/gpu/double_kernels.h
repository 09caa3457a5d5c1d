#pragma once

#include "stitch/transport/gpu/kernels/kernel_abi.h"

// The kernels of libstitch_kernels.so over the double of CUDA: their own code, run on the host in a
// kernel of the double, which sees what they read and write.
namespace stitch::testing::double_device {

[[nodiscard]] const transport::gpu::KernelTable& kernels();
// The same with no code for the architecture of cuda:1 (and, at use, none for updates of rows on
// any device): which CUDA says when they are loaded there, or only when they are to run.
enum class Says { at_load, at_use };
[[nodiscard]] const transport::gpu::KernelTable& kernels_without_image(Says when);
// The same, of which loading fails the next `times`, with `status`; or whose updates of rows step
// some rows and no others.
[[nodiscard]] const transport::gpu::KernelTable& kernels_that_fail_to_load(int status, int times);
[[nodiscard]] const transport::gpu::KernelTable& kernels_that_stop_halfway();
// How often they have been launched.
[[nodiscard]] int packings();
[[nodiscard]] int row_updates();

}  // namespace stitch::testing::double_device
