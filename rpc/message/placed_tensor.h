#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <optional>
#include <string>
#include <utility>

namespace stitch::transport {
struct Buffer;
}

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

namespace stitch::rpc {

struct InMessage;

// A caller's tensor that the result of a call is to be received into (Target::into). Belongs to one
// call. Thread contract: set() before the call starts; the others by the thread that reads, or that
// waits for devices, one at a time.
class IntoTensor {
 public:
  // Throws Error(invalid_argument) when no result can be received into it: it must be a dense
  // tensor on the CPU or a CUDA device without requires_grad. On a device it is written behind what
  // the caller's current stream has queued by now.
  void set(at::Tensor tensor);
  [[nodiscard]] bool is_set() const noexcept { return tensor_.defined(); }
  // Its memory, when that is on the CPU, contiguous, of `bytes` bytes and not handed out yet; else
  // an empty Buffer.
  [[nodiscard]] transport::Buffer place(std::size_t bytes) noexcept;
  // For a tensor on a device: queues the copy of a result that has arrived on it, and returns on
  // what stream; store_result() must not be called before its end, and does nothing more. Nothing
  // when there is nothing to copy that way.
  [[nodiscard]] std::optional<c10::Stream> store_later(const InMessage& message);
  // Makes the tensor hold the result, which may be in its memory already, and returns it. A result
  // that requires grad is returned as a tensor of its own, over the same memory and with the same
  // version counter. Throws Error(invalid_argument) naming both when they differ in dtype or sizes.
  [[nodiscard]] at::Tensor store_result(at::Tensor result);

 private:
  at::Tensor tensor_;
  bool placed_ = false;
  std::optional<c10::Stream> stream_;  // of a tensor on a device
  bool stored_ = false;
};

}  // namespace stitch::rpc
