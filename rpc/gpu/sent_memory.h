#pragma once

#include <ATen/core/Tensor.h>

namespace stitch::rpc {

// What a transfer keeps alive at its source: the tensor whose bytes it moves. A receiver in the
// same process finds it again, and may take the memory. Thread contract: constant once made.
struct SentMemory {
  SentMemory() = default;
  SentMemory(const SentMemory&) = delete;
  SentMemory& operator=(const SentMemory&) = delete;
  virtual ~SentMemory() = default;

  // Whether all that the sender's stream has been given by now has ended. On a lane.
  [[nodiscard]] virtual bool stream_is_idle() const noexcept = 0;

  at::Tensor bytes;  // dense
};

}  // namespace stitch::rpc
