#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <string>
#include <utility>

namespace stitch {

// A tensor, and the device of the receiver that it is to be put on, whatever the device map says.
// Made by on(). Sendable: as an argument for a parameter of type at::Tensor, as a result (the
// caller gets an at::Tensor), inside containers and structs. A received one is where it was put.
// Thread contract: as at::Tensor.
class PlacedTensor {
 public:
  PlacedTensor() = default;
  // See on().
  PlacedTensor(c10::Device device, at::Tensor tensor)
      : device_(device), tensor_(std::move(tensor)) {}
  // A tensor that was received.
  explicit PlacedTensor(at::Tensor tensor)
      : device_(tensor.defined() ? tensor.device() : c10::Device(c10::kCPU)),
        tensor_(std::move(tensor)) {}

  // Where it is to be put; of a received one where it is.
  [[nodiscard]] c10::Device device() const noexcept { return device_; }
  // The tensor, where it is here.
  [[nodiscard]] const at::Tensor& tensor() const noexcept { return tensor_; }
  // The same: it is used as the tensor.
  operator const at::Tensor&() const noexcept { return tensor_; }

 private:
  c10::Device device_{c10::kCPU};
  at::Tensor tensor_;
};

// Has `tensor`, of any device here, put on `device` of the receiver: "cpu", "cuda:1", at::kCPU.
// "cuda" without a number is its first. The call fails with invalid_argument, before anything is
// sent, when the receiver has no such device. Throws Error(invalid_argument) for a text that names
// none.
[[nodiscard]] inline PlacedTensor on(c10::Device device, at::Tensor tensor) {
  return {device, std::move(tensor)};
}
[[nodiscard]] PlacedTensor on(const std::string& device, at::Tensor tensor);

namespace detail {

// What the caller gets for a result of type R.
template <class R>
struct Received {
  using type = R;
};
template <>
struct Received<PlacedTensor> {
  using type = at::Tensor;
};
template <class R>
using ReceivedT = typename Received<R>::type;

}  // namespace detail

}  // namespace stitch
