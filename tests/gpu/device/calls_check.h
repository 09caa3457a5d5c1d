#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>
#include <string>

// What the checks of calls with tensors on devices need of the devices, which are GPUs, or the
// double of CUDA on a machine without one.
namespace stitch::gpu_check {

// Empty, or why there is no device. To be called first.
[[nodiscard]] std::string set_up_devices();
[[nodiscard]] int device_count();
// libtorch's own engine runs backward passes over tensors of these devices.
[[nodiscard]] bool has_local_engine();
[[nodiscard]] c10::Stream pool_stream(at::Device device);
// Queues on the current stream of the device what takes it a while.
void delay(at::Device device);
// How much to run: the variable, else this many.
[[nodiscard]] int number_of(const char* variable, int otherwise);
inline constexpr int kTrialsOnGpu = 1000;
[[nodiscard]] int default_trials();
[[nodiscard]] int default_programs();
// What libtorch's allocator has of device 0; nothing over the double, which has none.
[[nodiscard]] std::optional<std::int64_t> reserved_bytes();
// What was done wrong since the last call; empty where that is not known.
[[nodiscard]] std::string take_violations();

}  // namespace stitch::gpu_check
