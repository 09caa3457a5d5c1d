#include "stitch/rpc/peers/heartbeats.h"

#include <pthread.h>

#include <utility>

#include "stitch/base/callback_scope.h"
#include "stitch/base/signals.h"

namespace stitch::rpc {

void Heartbeats::start(std::chrono::nanoseconds interval, std::function<void()> beat) {
  base::MutexLock lock(join_mutex_);
  const base::SignalsBlocked blocked;  // the thread inherits that
  thread_ = std::thread([this, interval, beat = std::move(beat)] { run(interval, beat); });
}

void Heartbeats::stop() noexcept {
  {
    base::MutexLock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  base::MutexLock lock(join_mutex_);
  if (thread_.joinable()) thread_.join();
}

void Heartbeats::run(std::chrono::nanoseconds interval, const std::function<void()>& beat) {
  pthread_setname_np(pthread_self(), "stitch-beat");
  const base::CallbackScope callbacks;  // of messages whose writing a beat ends
  for (;;) {
    {
      const auto next = std::chrono::steady_clock::now() + interval;
      base::MutexLock lock(mutex_);
      while (!stopping_ && std::chrono::steady_clock::now() < next)
        changed_.wait_until(mutex_, next);
      if (stopping_) return;
    }
    beat();
  }
}

}  // namespace stitch::rpc
