#pragma once

#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"

namespace stitch::base {

// A thread that runs tasks one at a time: posted ones in the order of posting, timed ones when they
// are due. It sleeps without a timeout when there is nothing to do. Owned by an endpoint. Thread
// contract: any thread; join() not from a task. After join() no task runs on it.
class TaskThread {
 public:
  using Task = UniqueFunction<void()>;

  TaskThread();  // throws Error(overloaded) when the system refuses
  ~TaskThread();

  // Queues a task, which throws nothing. Once the thread has ended, tasks run inside post()
  // instead, one at a time all the same: on this thread, or on one that is running another there.
  void post(Task task);
  // Runs a task once `due` has passed. Dropped when the thread ends before that.
  void post_at(std::chrono::steady_clock::time_point due, Task task);
  // Runs the posted tasks and those that they post, then ends the thread. A second call returns
  // together with the first.
  void join();

 private:
  using Time = std::chrono::steady_clock::time_point;
  struct Timed {
    Time due;
    std::uint64_t sequence;  // tasks due at one time run in the order of posting
    Task task;
  };
  static bool later(const Timed& left, const Timed& right) noexcept {
    return left.due != right.due ? left.due > right.due : left.sequence > right.sequence;
  }
  void run();
  using Tasks = std::vector<Task>;
  static void run_all(Tasks& batch) noexcept;

  Mutex mutex_;
  CondVar changed_;
  Tasks posted_ STITCH_GUARDED_BY(mutex_);
  std::vector<Timed> timed_ STITCH_GUARDED_BY(mutex_);  // a heap, the earliest first
  std::uint64_t sequence_ STITCH_GUARDED_BY(mutex_) = 0;
  bool sleeping_ STITCH_GUARDED_BY(mutex_) = false;
  bool stopping_ STITCH_GUARDED_BY(mutex_) = false;
  bool ended_ STITCH_GUARDED_BY(mutex_) = false;
  bool posters_run_ STITCH_GUARDED_BY(mutex_) = false;  // tasks, on a thread inside post()
  Mutex join_mutex_;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace stitch::base
