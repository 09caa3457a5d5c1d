#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"
#include "stitch/rpc/future/thread_pool.h"

namespace stitch::rpc {

// Runs the stop callbacks of handlers, and completes calls that have timed out, on dedicated
// threads: handlers may hold every user-function thread, and the reader or timer thread that asks
// for this must not wait for user code. Threads are created when first needed. Part of ServedCalls.
// Thread contract: any thread.
class StopCallbacks {
 public:
  // At most `threads` at a time, and more while some of them wait for futures.
  StopCallbacks(int threads, std::string name) : threads_(threads), name_(std::move(name)) {}

  // Runs `task` on such a thread, or on this one if none can be created or after close_until().
  void run(base::UniqueFunction<void()> task) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] bool on_this_thread() const STITCH_EXCLUDES(mutex_);
  // Waits for running callbacks. False when `deadline` passed first.
  bool close_until(std::chrono::steady_clock::time_point deadline) STITCH_EXCLUDES(mutex_);

 private:
  const int threads_;
  const std::string name_;
  mutable base::Mutex mutex_;
  std::shared_ptr<ThreadPool> pool_ STITCH_GUARDED_BY(mutex_);
  bool closed_ STITCH_GUARDED_BY(mutex_) = false;
};

}  // namespace stitch::rpc
