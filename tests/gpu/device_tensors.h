#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>

#include "stitch/rpc/worker.h"
#include "tests/support/eventually.h"

// Tensors on the devices that tests make up.
namespace stitch::testing {

[[nodiscard]] inline at::Device device(int index) {
  return {at::kCUDA, static_cast<c10::DeviceIndex>(index)};
}
// Floats, all of that value.
[[nodiscard]] inline at::Tensor filled(int index, float value, at::IntArrayRef sizes) {
  return at::full(sizes, value, at::TensorOptions().dtype(at::kFloat).device(device(index)));
}
[[nodiscard]] inline bool all_are(const at::Tensor& tensor, float value) {
  return at::all(tensor.cpu() == value).item<bool>();
}
[[nodiscard]] inline bool holds(const at::Tensor& tensor, int index, float value) {
  return tensor.device() == device(index) && all_are(tensor, value);
}
// What a float tensor is after it has travelled as `type`.
[[nodiscard]] inline at::Tensor rounded(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.cpu().to(type).to(at::kFloat);
}
// Tensors of worker 0 on cuda:0 are on cuda:1 at worker 1.
inline void worker0_maps(Options& options) {
  if (options.rank == 0) options.device_maps["worker1"] = {{"cuda:0", "cuda:1"}};
}

// A number of debug_info(); 0 where there is none of that name.
[[nodiscard]] inline std::int64_t count(Worker& worker, const std::string& key) {
  const auto numbers = worker.debug_info();
  const auto found = numbers.find(key);
  return found == numbers.end() ? 0 : found->second;
}
// Waits until what this worker sends has ended, and so is counted: an answer may be here before.
[[nodiscard]] inline bool all_is_counted(Worker& worker) {
  return eventually([&] { return count(worker, "gpu.transfers_sending") == 0; });
}

}  // namespace stitch::testing
