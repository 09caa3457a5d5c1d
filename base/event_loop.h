#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "stitch/base/unique_function.h"

struct uv_loop_s;

namespace stitch::base {

// One libuv loop on one thread of its own: a worker's timers and its TCP store run here. Thread
// contract: post(), call_at() and cancel() from any thread; callbacks run on the loop's thread, one
// at a time, and must not block or throw. close() rejects further work, runs what was posted before
// it, drops timers without calling them, and joins the thread; it must not be called from the
// loop's thread. The destructor closes.
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
  // Runs `task` once on the loop's thread, at `when` or soon after.
  TimerId call_at(Clock::time_point when, UniqueFunction<void()> task);
  // True when the timer will not run; false when it has run, is running, or never existed.
  bool cancel(TimerId timer);
  [[nodiscard]] bool on_loop_thread() const;
  void close();

  // The libuv loop. REQUIRES: on the loop's thread.
  [[nodiscard]] uv_loop_s* raw();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace stitch::base
