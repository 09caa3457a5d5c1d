#include "stitch/rpc/future_state.h"

#include <utility>
#include <vector>

#include "stitch/rpc/agent.h"
#include "stitch/rpc/thread_pool.h"

namespace stitch::detail {

namespace {

using Callbacks = std::vector<UniqueFunction<void()>>;

// What waits for the callback that runs on this thread, which brought it about.
class Waiting {
 public:
  void add(Callbacks callbacks) {
    for (auto& callback : callbacks) callbacks_.push_back(std::move(callback));
  }
  void run() {
    while (next_ < callbacks_.size()) {
      auto callback = std::move(callbacks_[next_++]);
      if (next_ == callbacks_.size()) {
        callbacks_.clear();
        next_ = 0;
      }
      callback();
    }
  }

 private:
  Callbacks callbacks_;
  std::size_t next_ = 0;
};
thread_local Waiting* behind_callback = nullptr;  // null: no callback runs, or it waits itself

// Runs callbacks one after another, never one inside another.
void run_in_turn(Callbacks callbacks) {
  if (callbacks.empty()) return;
  if (behind_callback != nullptr) {
    behind_callback->add(std::move(callbacks));
    return;
  }
  Waiting waiting;
  behind_callback = &waiting;
  if (callbacks.size() == 1) {
    callbacks.front()();
  } else {
    waiting.add(std::move(callbacks));
  }
  waiting.run();
  behind_callback = nullptr;
}

// A callback that waits, perhaps for what waits for it.
class WaitingInside {
 public:
  WaitingInside() {
    if (behind_callback == nullptr) return;
    behind_callback->run();
    outer_ = std::exchange(behind_callback, nullptr);
  }
  ~WaitingInside() {
    if (outer_ != nullptr) behind_callback = outer_;
  }
  WaitingInside(const WaitingInside&) = delete;
  WaitingInside& operator=(const WaitingInside&) = delete;

 private:
  Waiting* outer_ = nullptr;
};

}  // namespace

void FutureStateBase::wait() { static_cast<void>(wait_until(std::chrono::steady_clock::time_point::max())); }

bool FutureStateBase::wait_until(std::chrono::steady_clock::time_point deadline) {
  if (ready()) return true;
  const WaitingInside waiting;
  BlockingRegion blocking;
  if (help_current_worker(ready_, deadline)) return true;
  MutexLock lock(mutex_);
  while (!ready()) {
    if (!completed_.wait_until(mutex_, deadline)) return ready();
  }
  return true;
}

void FutureStateBase::on_ready(UniqueFunction<void()> callback) {
  {
    MutexLock lock(mutex_);
    if (!ready()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

bool FutureStateBase::set_exception(std::exception_ptr exception) {
  if (!claim()) return false;
  exception_ = std::move(exception);
  publish();
  return true;
}

void FutureStateBase::publish() {
  std::vector<UniqueFunction<void()>> callbacks;
  UniqueFunction<void()> canceller;
  {
    MutexLock lock(mutex_);
    ready_.store(true, std::memory_order_release);
    callbacks.swap(callbacks_);
    canceller = std::move(canceller_);
    completed_.notify_all();
  }
  run_in_turn(std::move(callbacks));
}

void FutureStateBase::cancel() {
  UniqueFunction<void()> canceller;
  {
    MutexLock lock(mutex_);
    if (ready()) return;
    canceller = std::move(canceller_);
  }
  if (canceller) {
    Callbacks asking;
    asking.push_back(std::move(canceller));
    run_in_turn(std::move(asking));
  }
  ask_to_stop();
  set_exception(std::make_exception_ptr(Error(ErrorCode::cancelled, "future was cancelled by its holder")));
}

void FutureStateBase::set_canceller(UniqueFunction<void()> canceller) {
  MutexLock lock(mutex_);
  if (!ready()) canceller_ = std::move(canceller);
}

}  // namespace stitch::detail
