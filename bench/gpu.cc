// Tensors from the device of one process to the device of the other, and back: latency of small
// ones, GB/s of large ones, beside copies on the device and between it and pinned memory.
#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <stdexcept>
#include <string>

#include "handlers.h"
#include "measure.h"
#include "stitch/rpc/future/current_streams.h"
#include "timing.h"
#include "world.h"

namespace stitch_bench {

namespace {

// The device that a process uses: each its own where there are two.
c10::Device device_of(int rank) {
  const bool two = stitch::rpc::cuda_device_count() > 1;
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(two ? rank : 0)};
}

void wait_for(c10::Device device) {
  const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
  cuda.synchronizeStream(cuda.getStream(device));
}

// What copies reach here: within the device, and between it and pinned memory.
void measure_ceilings(const Side& side, int mib) {
  const c10::Device device = device_of(side.rank());
  const auto bytes = static_cast<std::int64_t>(mib) << 20;
  const auto on_device = at::TensorOptions().dtype(at::kByte).device(device);
  const at::Tensor here = at::zeros({bytes}, on_device);
  const at::Tensor there = at::zeros({bytes}, on_device);
  const at::Tensor host = at::zeros({bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
  const auto report = [&](const std::string& name, const at::Tensor& to, const at::Tensor& from) {
    const auto times = time_each_us(side.settings().seconds, least_repetitions(mib), [&] {
      const_cast<at::Tensor&>(to).copy_(from, true);
      wait_for(device);
    });
    side.result("floor.gpu." + name + "." + std::to_string(mib) + "MiB",
                mib * kMiB / 1e9 / (median(times) * 1e-6), "GB/s");
  };
  report("device_copy", there, here);
  report("to_host", host, here);
  report("from_host", here, host);
}

void first(Side& side) {
  const stitch::Worker self = join_world(side);
  const c10::Device device = device_of(0);
  const auto here = at::TensorOptions().dtype(at::kByte).device(device);
  for (const std::int64_t kib : {0, 1, 16, 64, 128}) {
    const at::Tensor tensor = at::ones({std::max<std::int64_t>(1, kib << 10)}, here);
    const auto times = time_each_us(side.settings().seconds, 20, [&] {
      static_cast<void>(stitch::rpc_sync<&echo>(other(side), tensor));
    });
    report_latency(side, "gpu." + side.path() + ".echo." + std::to_string(kib) + "KiB", times);
  }
  for (const int mib : side.settings().sizes_mib) {
    measure_ceilings(side, mib);
    const at::Tensor tensor = at::randint(0, 256, {static_cast<std::int64_t>(mib) << 20}, here);
    if (!at::equal(stitch::rpc_sync<&echo>(other(side), tensor), tensor))
      throw std::runtime_error("what came back is not what was sent");
    const auto times = time_each_us(side.settings().seconds, least_repetitions(mib), [&] {
      static_cast<void>(stitch::rpc_sync<&echo>(other(side), tensor));
    });
    const std::string size = std::to_string(mib) + "MiB";
    side.result("gpu." + side.path() + ".echo." + size,
                2.0 * mib * kMiB / 1e9 / (median(times) * 1e-6), "GB/s",
                "floor.gpu.device_copy." + size);
  }
  // Which paths the bytes took.
  for (const auto& [name, bytes] : self.debug_info()) {
    if (name.starts_with("gpu.sent_bytes.")) side.result(name, static_cast<double>(bytes), "bytes");
  }
  finish(side);
}

}  // namespace

Measure gpu() {
  return {.name = "gpu",
          .about = "echo of a tensor on a GPU, --sizes MiB and small ones; needs a CUDA device",
          .needs_device = true,
          .paths = {"same_host", "tcp"},
          .first = &first,
          .second = &serve};
}

bool has_device() { return stitch::rpc::cuda_device_count() > 0; }

}  // namespace stitch_bench
