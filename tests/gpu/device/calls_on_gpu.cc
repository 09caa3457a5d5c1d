// The devices of calls_check.cc: GPUs.
#include <c10/cuda/CUDACachingAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>

#include "tests/gpu/device/calls_check.h"

namespace stitch::gpu_check {

namespace {

constexpr int kNoDevice = 77;

}  // namespace

std::string set_up_devices() {
  return torch::cuda::is_available() ? "" : "no device: libtorch sees no CUDA device";
}
int device_count() { return static_cast<int>(torch::cuda::device_count()); }
bool has_local_engine() { return true; }

c10::Stream pool_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(device);
}

// 128 MiB, written so often that it takes 3 ms at least: long beside a call, which would not wait
// for it if it were wrong.
void delay(at::Device device) {
  const at::Tensor memory =
      at::empty({std::int64_t{32} << 20}, at::TensorOptions().dtype(at::kFloat).device(device));
  const auto fill = [&](int times) {
    for (int i = 0; i < times; ++i) memory.fill_(i);
  };
  static const int kTimes = [&] {
    for (int times = 8;; times *= 2) {
      torch::cuda::synchronize(device.index());
      const auto begin = std::chrono::steady_clock::now();
      fill(times);
      torch::cuda::synchronize(device.index());
      constexpr int kMost = 1 << 12;
      if (std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(3) ||
          times >= kMost) {
        std::printf("delay: %d times 128 MiB\n", times);
        return times;
      }
    }
  }();
  fill(kTimes);
}

int default_trials() { return kTrialsOnGpu; }
int default_programs() { return 100; }
std::optional<std::int64_t> reserved_bytes() {
  // Of all kinds together, the first of them.
  return c10::cuda::CUDACachingAllocator::getDeviceStats(0).reserved_bytes[0].current;
}
std::string take_violations() { return {}; }

}  // namespace stitch::gpu_check

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const std::string why_not = stitch::gpu_check::set_up_devices();
  if (!why_not.empty()) {
    std::printf("%s\n", why_not.c_str());
    return stitch::gpu_check::kNoDevice;
  }
  return RUN_ALL_TESTS();
}
