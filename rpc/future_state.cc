#include "stitch/rpc/future_state.h"

#include "stitch/rpc/agent.h"
#include "stitch/rpc/thread_pool.h"

namespace stitch::detail {

void FutureStateBase::wait() { static_cast<void>(wait_until(std::chrono::steady_clock::time_point::max())); }

bool FutureStateBase::wait_until(std::chrono::steady_clock::time_point deadline) {
  if (ready()) return true;
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
  for (auto& callback : callbacks) callback();
}

void FutureStateBase::cancel() {
  UniqueFunction<void()> canceller;
  {
    MutexLock lock(mutex_);
    if (ready()) return;
    canceller = std::move(canceller_);
  }
  if (canceller) canceller();
  ask_to_stop();
  set_exception(std::make_exception_ptr(Error(ErrorCode::cancelled, "future was cancelled by its holder")));
}

void FutureStateBase::set_canceller(UniqueFunction<void()> canceller) {
  MutexLock lock(mutex_);
  if (!ready()) canceller_ = std::move(canceller);
}

}  // namespace stitch::detail
