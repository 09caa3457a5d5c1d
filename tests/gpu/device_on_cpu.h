#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

// What the devices that tests make up for a libtorch without CUDA have in common: tensors on them
// lie in memory of the host, and what libtorch computes with them it computes on the CPU.
namespace stitch::testing::device_on_cpu {

// What each does in its own way. Lives as long as the process. Thread contract: any thread.
class Device {
 public:
  virtual ~Device() = default;
  [[nodiscard]] virtual int current() const = 0;
  virtual void make_current(int device) const = 0;
  // Memory on the current device, or throws as libtorch does. What it returns has free_memory() as
  // its deleter.
  virtual c10::DataPtr allocate(std::size_t bytes) = 0;
  [[nodiscard]] virtual c10::DeleterFnPtr free_memory() const = 0;
  // Copies in the order of the current stream of `to`'s device, or of `from`'s where `to` is on the
  // CPU.
  virtual void copy(const at::Tensor& to, const at::Tensor& from, bool non_blocking) = 0;
  // Runs `work` in the order of the current stream of `where`, and has it end. It uses the memory
  // of tensors on devices as_cpu().
  virtual void compute(const std::string& name, c10::Device where,
                       const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& written,
                       const std::function<void()>& work) = 0;
  // Puts what was computed into a new tensor.
  virtual void put(const at::Tensor& made, const at::Tensor& result) = 0;
};

// Makes it the CUDA devices of libtorch, as far as memory and operators go. Once.
void install(Device& device);

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
