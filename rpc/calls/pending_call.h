#pragma once

#include "stitch/base/error.h"

namespace stitch::rpc {

class IntoTensor;
struct InMessage;

// What waits for the outcome of a call. Exactly one of on_reply() and on_error() is called, once,
// on a reader thread, the event loop or the thread that made the call; it must not block.
class PendingCall {
 public:
  virtual ~PendingCall() = default;
  // The reply; its tensors have been decoded. May throw: the error goes to on_error().
  virtual void on_reply(InMessage& message) = 0;
  virtual void on_error(const Error& error) = 0;
  // The caller's tensor that the result is received into, which reader threads use before
  // on_reply(); null for none. Lives as long as this.
  [[nodiscard]] virtual IntoTensor* into() noexcept { return nullptr; }
};

}  // namespace stitch::rpc
