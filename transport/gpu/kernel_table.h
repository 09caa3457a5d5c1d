#pragma once

#include <string>
#include <string_view>

#include "stitch/base/error.h"
#include "stitch/transport/gpu/kernels/kernel_abi.h"

namespace stitch::transport::gpu {

// The kernels of libstitch_kernels.so, or why there are none. What uses them copies tensor by
// tensor without them.
struct KernelLibrary {
  const KernelTable* table = nullptr;  // null: there is none
  std::string path;                    // of the library, where there is one
  std::string why_not;                 // where there is none
};

// Loads the library, which then stays loaded until the process ends. With STITCH_KERNELS set it is
// that file and no other; else the one beside this code or in ../lib of it, else the one that the
// dynamic linker finds. `devices`: how many CUDA devices the process has; for none, nothing is
// loaded. Never throws; any thread.
[[nodiscard]] KernelLibrary load_kernels(int devices);

// That file, whatever devices there are.
[[nodiscard]] KernelLibrary load_kernels_from(const std::string& path);

// What a function of the table returned, as an error: "pack 3 tensors on device 0: <text>". The
// code is invalid_argument for stitch's own refusals, and internal for errors of CUDA.
[[nodiscard]] Error kernel_error(const KernelTable& table, std::string_view what, int status);

}  // namespace stitch::transport::gpu
