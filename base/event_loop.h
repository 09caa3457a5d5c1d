#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "stitch/base/unique_function.h"

struct uv_loop_s;

namespace stitch::base {

// One libuv loop on one thread of its own: timers, stores and the status page of a worker run here.
// Thread contract: post(), call_at() and cancel() from any thread; callbacks run on the loop's
// thread, one at a time, and must not block. close() stops accepting work, runs what was posted
// before it, drops timers without calling them, and joins the thread; it must not be called from
// the loop's thread. The destructor closes.
class EventLoop {
 public:
  using Clock = std::chrono::steady_clock;
  using TimerId = std::uint64_t;  // never 0, never reused

  explicit EventLoop(const std::string& thread_name);
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Runs `task` on the loop's thread. False, and `task` is destroyed uncalled, when the loop is
  // closed.
  bool post(UniqueFunction<void()> task);
  // Runs `task` on the loop's thread at `when` or soon after, once.
  TimerId call_at(Clock::time_point when, UniqueFunction<void()> task);
  // True when the timer will now never run; false when it has run, is running, or never was.
  bool cancel(TimerId timer);
  [[nodiscard]] bool on_loop_thread() const;
  void close();

  // The loop itself. REQUIRES: on the loop's thread.
  [[nodiscard]] uv_loop_s* raw();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace stitch::base
