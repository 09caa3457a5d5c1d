#pragma once

#include <utility>

namespace stitch::transport {

// Set while this thread is inside a call to TensorPipe. TensorPipe has no thread for its pipes: the
// thread that calls it, or one of a transport, runs all callbacks that are due, also
// those of other connections. A callback that runs inside one of our own calls may be on a thread
// that holds a lock: it passes callbacks of the user to the endpoint's task thread. Any other runs
// on a thread of TensorPipe and delivers there, which saves a thread switch.
class InsideCall {
 public:
  InsideCall() noexcept : before_(std::exchange(current_, true)) {}
  ~InsideCall() { current_ = before_; }
  InsideCall(const InsideCall&) = delete;
  InsideCall& operator=(const InsideCall&) = delete;
  [[nodiscard]] static bool on_this_thread() noexcept { return current_; }

 private:
  static inline constinit thread_local bool current_ = false;
  const bool before_;
};

}  // namespace stitch::transport
