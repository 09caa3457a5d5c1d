#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "stitch/base/unique_function.h"
#include "stitch/rpc/future/blocking_region.h"

namespace stitch::rpc {

// Counts the waits of the task that this thread runs, inside one another. Null: not counted.
inline constinit thread_local std::atomic<int>* waits_here = nullptr;

// The user-function threads of one worker: a queue served in order by at most a fixed number of
// threads at a time. A thread is started when there is work for it and ends when it has been idle
// for a while; one always stays. A thread that says it is blocked (waiting for a future inside
// a handler) is replaced while it waits, so nested calls cannot use up the pool. Thread contract:
// any thread. A task must not throw. join_until() runs what is queued, then ends the threads.
class ThreadPool {
 public:
  // REQUIRES: threads > 0. At most `kMaxExtra` threads are added for blocked ones. One that has
  // been idle for `linger` ends.
  ThreadPool(int threads, std::string name,
             std::chrono::nanoseconds linger = std::chrono::seconds(1));
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // False, and the task is left untouched, when the pool has been closed.
  bool post(base::UniqueFunction<void()>& task);
  // For a task that must not wait for others to end and does not block itself: an idle thread
  // begins it immediately, ahead of what is queued, and no other task takes its place. False, and
  // the task is left untouched, when no thread is idle.
  bool post_if_free(base::UniqueFunction<void()>& task);
  // As post(), but wakes no thread: run_one_here() or wake() is to follow.
  bool post_quietly(base::UniqueFunction<void()>& task);
  // Runs the next task on this thread, which counts as one of the pool's meanwhile; a thread of the
  // pool is woken for what else is queued, unless that is `watched`: then the caller comes back for
  // it, or calls wake() on another thread when the task takes long. Does nothing when every thread
  // is busy. True when more is queued then. REQUIRES: a thread of this framework: a task that
  // returns in a forked child ends that process.
  bool run_one_here(bool watched);
  // Wakes a thread for what is queued.
  void wake();
  // Refuses new tasks. The queued ones still run.
  void close();
  // Waits until the queue is empty and all threads have ended. False when `deadline` passed first;
  // the threads that are still inside a task are then left to end by themselves and must be kept
  // from outliving what they use. REQUIRES: close() was called; not on a thread of this pool.
  bool join_until(std::chrono::steady_clock::time_point deadline);
  [[nodiscard]] bool on_pool_thread() const noexcept;
  // Of whichever pool.
  [[nodiscard]] static bool on_any_pool_thread() noexcept;
  [[nodiscard]] std::size_t queued() const;
  [[nodiscard]] int threads() const;
  // How many tasks run at a time, those that wait not counted.
  [[nodiscard]] int max_running() const noexcept;
  // How often a thread was needed and could not be added: kMaxExtra existed already, or the system
  // had none. Either is reported on stderr, once.
  [[nodiscard]] std::uint64_t threads_missed() const;

  static constexpr int kMaxExtra = 256;
  struct State;  // shared with the threads, which may outlive the pool
  // Of the pool that this thread serves; null for none, or when that has ended.
  [[nodiscard]] static std::shared_ptr<State> of_this_thread();

 private:
  static void serve(const std::shared_ptr<State>& state);
  static void start_thread(const std::shared_ptr<State>& state);
  std::shared_ptr<State> state_;
};

}  // namespace stitch::rpc
