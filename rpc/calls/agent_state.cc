#include "stitch/rpc/calls/agent_state.h"

#include "stitch/base/callback_scope.h"
#include "stitch/base/error.h"
#include "stitch/rpc/future/thread_pool.h"

namespace stitch::rpc {

void AgentState::throw_if_stopped() const {
  if (forked()) {
    throw Error(ErrorCode::invalid_argument,
                to_string(self_) +
                    " belongs to the process that this one was forked from: a forked child can "
                    "only exec, or do without stitch")
        .with_worker(self_.name);
  }
  if (!restricted_.load(std::memory_order_acquire)) return;
  if (stopped()) {
    throw Error(ErrorCode::shutting_down, to_string(self_) + " has shut down")
        .with_worker(self_.name);
  }
  {
    base::MutexLock lock(mutex_);
    if (fenced_) throw Error(*fenced_);
  }
  if (ThreadPool::on_any_pool_thread() || base::CallbackScope::on_this_thread()) return;
  throw Error(ErrorCode::shutting_down,
              to_string(self_) + " is shutting down: only its handlers can begin something new")
      .with_worker(self_.name);
}

bool AgentState::ended() const {
  base::MutexLock lock(mutex_);
  return ended_;
}

void AgentState::fence(const Error& error) {
  base::MutexLock lock(mutex_);
  fenced_ = error;
  restricted_.store(true, std::memory_order_release);
}

bool AgentState::fenced() const {
  base::MutexLock lock(mutex_);
  return fenced_.has_value();
}

bool AgentState::begin_shutdown() {
  base::MutexLock lock(mutex_);
  restricted_.store(true, std::memory_order_release);
  return !shutting_down_.exchange(true);
}

bool AgentState::await_end(std::chrono::steady_clock::time_point deadline) const {
  base::MutexLock lock(mutex_);
  while (!ended_) {
    if (!ended_changed_.wait_until(mutex_, deadline)) return ended_;
  }
  return true;
}

void AgentState::end() {
  base::MutexLock lock(mutex_);
  ended_ = true;
  ended_changed_.notify_all();
}

}  // namespace stitch::rpc
