#pragma once

#include <ATen/core/Tensor.h>

#include "stitch/transport/wire/buffer.h"

namespace stitch::rpc {

// A caller's tensor that the result of a call is to be received into (Target::into). Belongs to one
// call. Thread contract: set() before the call starts; place() and store_result() by the
// thread that reads, one at a time.
class IntoTensor {
 public:
  // Throws Error(invalid_argument) when no result can be received into it: it must be a dense
  // tensor on the CPU without requires_grad.
  void set(at::Tensor tensor);
  [[nodiscard]] bool is_set() const noexcept { return tensor_.defined(); }
  // Its memory, when that is contiguous, of `bytes` bytes and not handed out yet; else an empty
  // Buffer.
  [[nodiscard]] transport::Buffer place(std::size_t bytes) noexcept;
  // Makes the tensor hold the result, which may be in its memory already, and returns it; the
  // result itself when that carries autograd history. Throws Error(invalid_argument) naming both
  // when they differ in dtype or sizes.
  [[nodiscard]] at::Tensor store_result(at::Tensor result);

 private:
  at::Tensor tensor_;
  bool placed_ = false;
};

}  // namespace stitch::rpc
