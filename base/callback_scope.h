#pragma once

namespace stitch::base {

// Marks a block in which this thread runs callbacks of an endpoint or an event loop, where code
// must not wait for the end of either. Blocks nest.
class CallbackScope {
 public:
  CallbackScope() noexcept { ++depth_; }
  ~CallbackScope() { --depth_; }
  CallbackScope(const CallbackScope&) = delete;
  CallbackScope& operator=(const CallbackScope&) = delete;
  [[nodiscard]] static bool on_this_thread() noexcept { return depth_ > 0; }
  // How many this thread is in.
  [[nodiscard]] static int depth() noexcept { return depth_; }

 private:
  static inline constinit thread_local int depth_ = 0;
};

}  // namespace stitch::base
