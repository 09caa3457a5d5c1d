#pragma once

#include <memory>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/rpc/future/runtime.h"

namespace stitch::rpc {

// The workers of this process, so that a program with one need not say which. Never destroyed:
// workers may outlive other static objects. Thread contract: any thread. No last reference to a
// worker is released under the lock: ending one calls back into here.
class LiveRuntimes {
 public:
  // A forked child has a list of its own: a thread of the parent may hold the lock of the other.
  [[nodiscard]] static LiveRuntimes& of_this_process();
  // Whether this process was forked from one that had a worker.
  [[nodiscard]] bool forked_from_workers() const noexcept { return forked_from_workers_; }

  void add(const std::shared_ptr<Runtime>& runtime) STITCH_EXCLUDES(mutex_);
  void remove(const Runtime* runtime) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::vector<std::shared_ptr<Runtime>> all() STITCH_EXCLUDES(mutex_);
  // Null when there is none or more than one.
  [[nodiscard]] std::shared_ptr<Runtime> sole() STITCH_EXCLUDES(mutex_);
  // Null when there is none.
  [[nodiscard]] std::shared_ptr<Runtime> any() STITCH_EXCLUDES(mutex_);
  // Throws `shutting_down` when the last one has shut down, `invalid_argument` when there is none
  // or more than one.
  [[nodiscard]] std::shared_ptr<Runtime> only() STITCH_EXCLUDES(mutex_);

 private:
  LiveRuntimes(std::uint32_t fork, bool forked_from_workers)
      : fork_(fork), forked_from_workers_(forked_from_workers) {}
  struct Record {
    const Runtime* runtime;  // compared, never followed
    std::weak_ptr<Runtime> owner;
  };
  const std::uint32_t fork_;  // base::fork_count() of its process
  const bool forked_from_workers_;
  base::Mutex mutex_;
  std::vector<Record> records_ STITCH_GUARDED_BY(mutex_);
  bool last_gone_ STITCH_GUARDED_BY(mutex_) = false;
  std::atomic<std::size_t> count_{0};  // of records_
};

// The one of the running handler, continuation or WorkerScope, else the process's only one. Throws
// as LiveRuntimes::only().
[[nodiscard]] std::shared_ptr<Runtime> current_runtime();

// Runtime::help() of the current worker, if any. Throws `invalid_argument` in a process that was
// forked from one with a worker and has none: nothing would ever set `done`.
bool help_current_runtime(base::AwaitedFlag& done, Clock::time_point deadline);

// Throws `invalid_argument`: `what` does not work in a forked child.
[[noreturn]] void refuse_forked_child(const char* what);

}  // namespace stitch::rpc
