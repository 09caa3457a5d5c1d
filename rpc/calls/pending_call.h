#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <optional>

#include "stitch/base/error.h"
#include "stitch/rpc/message/message.h"

namespace stitch::rpc {

// What waits for the outcome of a call. Exactly one of on_reply() and on_error() is called, once,
// on a reader thread, the event loop or the thread that made the call; it must not block.
class PendingCall {
 public:
  virtual ~PendingCall() = default;
  // The reply; its tensors have been decoded. May throw: the error goes to on_error().
  virtual void on_reply(InMessage& message) = 0;
  virtual void on_error(const Error& error) = 0;
  // Memory for the `bytes` bytes of the reply's tensors; without data for no preference. On a
  // reader thread, before on_reply().
  [[nodiscard]] virtual transport::Buffer place(std::size_t bytes) noexcept { return {}; }
  // A reply's tensors are on their devices: queues what on_reply() is to find done there, and
  // returns on what stream; nothing when that is nothing. On a thread that must not wait.
  [[nodiscard]] virtual std::optional<c10::Stream> store_later(const InMessage& message) {
    return std::nullopt;
  }
};

}  // namespace stitch::rpc
