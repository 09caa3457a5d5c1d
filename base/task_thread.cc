#include "stitch/base/task_thread.h"

#include <pthread.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "stitch/base/callback_scope.h"
#include "stitch/base/error.h"

namespace stitch::base {

TaskThread::TaskThread() {
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    throw Error(ErrorCode::overloaded, "thread that runs an endpoint's tasks cannot be started: " +
                                           error.code().message());
  }
}

TaskThread::~TaskThread() { join(); }

void TaskThread::post(Task task) {
  Tasks batch;
  {
    MutexLock lock(mutex_);
    posted_.push_back(std::move(task));
    if (!ended_) {
      if (sleeping_) changed_.notify_one();
      return;
    }
    if (std::exchange(posters_run_, true)) return;
    batch.swap(posted_);
  }
  while (!batch.empty()) {
    run_all(batch);
    MutexLock lock(mutex_);
    batch.swap(posted_);
    posters_run_ = !batch.empty();
  }
}

void TaskThread::run_all(Tasks& batch) noexcept {
  for (Task& task : batch) {
    task();
    task = nullptr;
  }
  batch.clear();
}

void TaskThread::post_at(Time due, Task task) {
  MutexLock lock(mutex_);
  if (ended_) return;
  timed_.push_back(Timed{due, sequence_++, std::move(task)});
  std::push_heap(timed_.begin(), timed_.end(), later);
  if (sleeping_ && timed_.front().due == due) changed_.notify_one();
}

void TaskThread::join() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.notify_one();
  }
  MutexLock lock(join_mutex_);
  if (thread_.joinable()) thread_.join();
}

void TaskThread::run() {
  pthread_setname_np(pthread_self(), "stitch-tasks");
  const CallbackScope callbacks;
  Tasks batch;
  std::vector<Timed> dropped;
  for (;;) {
    {
      MutexLock lock(mutex_);
      while (posted_.empty() && !stopping_) {
        if (!timed_.empty() && timed_.front().due <= std::chrono::steady_clock::now()) break;
        sleeping_ = true;
        changed_.wait_until(mutex_, timed_.empty() ? Time::max() : timed_.front().due);
        sleeping_ = false;
      }
      batch.swap(posted_);
      if (batch.empty() && stopping_) {
        ended_ = true;
        dropped.swap(timed_);  // destroyed after the lock is released: tasks may own anything
        return;
      }
      if (!timed_.empty() && !stopping_) {
        const Time now = std::chrono::steady_clock::now();
        while (!timed_.empty() && timed_.front().due <= now) {
          std::pop_heap(timed_.begin(), timed_.end(), later);
          batch.push_back(std::move(timed_.back().task));
          timed_.pop_back();
        }
      }
    }
    run_all(batch);
  }
}

}  // namespace stitch::base
