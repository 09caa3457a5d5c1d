#pragma once

#include <cstdint>

#include "stitch/transport/gpu/kernels/kernel_abi.h"
#include "tests/gpu/device/kernel_report.h"

namespace stitch::transport::gpu {

// What the checks and measurements of the kernels work with.
struct KernelCheck {
  const KernelTable& table;
  int device;
  int rounds;           // of random shapes for a check; of runs for a figure
  std::uint64_t bytes;  // of the tensors that are measured together
  KernelReport& report;
};

// Compare the kernels with references on the host.
void check_pack(const KernelCheck& check);
void check_sparse(const KernelCheck& check);
// Measure them beside a copy within the device.
void measure_pack(const KernelCheck& check);
void measure_sparse(const KernelCheck& check);

}  // namespace stitch::transport::gpu
