#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"
#include "stitch/rpc/future/thread_pool.h"

namespace stitch::rpc {

// Threads that launch work on devices, one for each device that has some: what takes long on the
// CPU, or waits for one device, does not keep the others waiting. One that waits for a future is
// replaced meanwhile. Each is started when it is first needed. Part of an Agent. Thread contract:
// any thread.
class DeviceThreads {
 public:
  explicit DeviceThreads(std::string worker_name) : worker_name_(std::move(worker_name)) {}

  // Runs `task` on the thread of that device. False, and the task is left untouched, where no
  // thread can be created, and after close_until().
  [[nodiscard]] bool post(c10::Device device, base::UniqueFunction<void()>& task)
      STITCH_EXCLUDES(mutex_);
  [[nodiscard]] bool on_this_thread() const STITCH_EXCLUDES(mutex_);
  // Waits for what they run. False when `deadline` passed first.
  [[nodiscard]] bool close_until(std::chrono::steady_clock::time_point deadline)
      STITCH_EXCLUDES(mutex_);

 private:
  using Key = std::pair<c10::DeviceType, c10::DeviceIndex>;

  const std::string worker_name_;
  std::atomic<bool> any_{false};  // a thread has been started
  mutable base::Mutex mutex_;
  std::map<Key, std::shared_ptr<ThreadPool>> pools_ STITCH_GUARDED_BY(mutex_);
  bool closed_ STITCH_GUARDED_BY(mutex_) = false;
};

}  // namespace stitch::rpc
