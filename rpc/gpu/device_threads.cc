#include "stitch/rpc/gpu/device_threads.h"

#include <algorithm>

#include "stitch/base/error.h"

namespace stitch::rpc {

bool DeviceThreads::post(c10::Device device, base::UniqueFunction<void()>& task) {
  std::shared_ptr<ThreadPool> pool;
  try {
    base::MutexLock lock(mutex_);
    if (closed_) return false;
    std::shared_ptr<ThreadPool>& known = pools_[{device.type(), device.index()}];
    if (!known) known = std::make_shared<ThreadPool>(1, device.str() + "-" + worker_name_);
    pool = known;
    any_.store(true, std::memory_order_relaxed);
  } catch (const Error&) {
    return false;  // the system gives no thread
  }
  return pool->post(task);
}

bool DeviceThreads::on_this_thread() const {
  if (!any_.load(std::memory_order_relaxed)) return false;
  base::MutexLock lock(mutex_);
  return std::any_of(pools_.begin(), pools_.end(),
                     [](const auto& each) { return each.second && each.second->on_pool_thread(); });
}

bool DeviceThreads::close_until(std::chrono::steady_clock::time_point deadline) {
  std::map<Key, std::shared_ptr<ThreadPool>> pools;
  {
    base::MutexLock lock(mutex_);
    closed_ = true;
    pools = pools_;
  }
  bool ended = true;
  for (const auto& [device, pool] : pools) {
    if (pool) pool->close();
  }
  for (const auto& [device, pool] : pools) {
    if (pool) ended = pool->join_until(deadline) && ended;
  }
  return ended;
}

}  // namespace stitch::rpc
