#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <optional>

#include "stitch/transport/wire/buffer.h"

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
