#include "stitch/rpc/calls/stop_callbacks.h"

#include <exception>

namespace stitch::rpc {

void StopCallbacks::run(base::UniqueFunction<void()> task) {
  std::shared_ptr<ThreadPool> pool;
  try {
    base::MutexLock lock(mutex_);
    if (!pool_ && !closed_) pool_ = std::make_shared<ThreadPool>(threads_, name_);
    pool = pool_;
  } catch (const std::exception&) {
    // No thread can be created: it runs here.
  }
  if (!pool || !pool->post(task)) task();
}

bool StopCallbacks::on_this_thread() const {
  base::MutexLock lock(mutex_);
  return pool_ && pool_->on_pool_thread();
}

bool StopCallbacks::close_until(std::chrono::steady_clock::time_point deadline) {
  std::shared_ptr<ThreadPool> pool;
  {
    base::MutexLock lock(mutex_);
    closed_ = true;
    pool = pool_;
  }
  if (!pool) return true;
  pool->close();
  return pool->join_until(deadline);
}

}  // namespace stitch::rpc
