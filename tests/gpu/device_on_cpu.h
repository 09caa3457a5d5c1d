#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

// What device_on_cpu.cc asks double_torch_device.cc for. Any thread.
namespace stitch::testing::double_device {

[[nodiscard]] int current_device();
void make_current(int device);
// Memory on the current device, or throws as libtorch does. What it returns has free_memory() as
// its deleter.
[[nodiscard]] c10::DataPtr allocate(std::size_t bytes);
void free_memory(void* data);
// Copies in the order of the current stream of `to`'s device, or of `from`'s where `to` is on the
// CPU.
void copy_tensor(const at::Tensor& to, const at::Tensor& from, bool non_blocking);
// Runs `work` in the order of the current stream of `where`, and has it end. It uses the memory of
// tensors on devices as_cpu().
void compute(const std::string& name, c10::Device where, const std::vector<at::Tensor>& read,
             const std::vector<at::Tensor>& written, const std::function<void()>& work);

}  // namespace stitch::testing::double_device

// What libtorch, which has no CUDA here, computes with tensors on the double's devices: they lie in
// memory of the host, and it is computed on the CPU.
namespace stitch::testing::device_on_cpu {

[[nodiscard]] c10::Allocator* allocator();
[[nodiscard]] c10::Stream make_stream(c10::Device device, std::int64_t id);
// With the index of the current one where it has none.
[[nodiscard]] c10::Device indexed(c10::Device device);
// The same memory, as a tensor on the CPU that owns nothing.
[[nodiscard]] at::Tensor as_cpu(const at::Tensor& tensor);
[[nodiscard]] inline at::Tensor as_cpu_if_on_device(const at::Tensor& tensor) {
  return tensor.is_cuda() ? as_cpu(tensor) : tensor;
}
// What the body of a copy does.
void copy_on_cpu(const at::Tensor& to, const at::Tensor& from);
[[nodiscard]] inline const void* base(const at::Tensor& tensor) {
  return tensor.storage().data_ptr().get();
}

// Another current device, for a block.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const int outer_;
};

}  // namespace stitch::testing::device_on_cpu
