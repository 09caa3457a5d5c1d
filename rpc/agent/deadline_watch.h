#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <utility>

#include "stitch/base/event_loop.h"
#include "stitch/base/mutex.h"

namespace stitch::rpc {

// One timer for many deadlines: set at the earliest of them, never more than one at a time. Its
// task looks for what is due and asks for the next time. Shared, because the timer may outlive its
// owner. Thread contract: any thread; `fire` runs on the loop's thread, no lock held.
class DeadlineWatch : public std::enable_shared_from_this<DeadlineWatch> {
 public:
  using Time = std::chrono::steady_clock::time_point;
  DeadlineWatch(std::weak_ptr<base::EventLoop> loop, std::function<void()> fire)
      : loop_(std::move(loop)), fire_(std::move(fire)) {}

  // `fire` will be called at `when` or soon after, at the latest. Takes no lock when that is
  // certain already.
  void watch(Time when) STITCH_EXCLUDES(mutex_);

 private:
  void due(Time when) STITCH_EXCLUDES(mutex_);

  const std::weak_ptr<base::EventLoop> loop_;
  const std::function<void()> fire_;
  std::atomic<Time::rep> at_{Time::max().time_since_epoch().count()};  // written under mutex_
  base::Mutex mutex_;
  base::EventLoop::TimerId timer_ STITCH_GUARDED_BY(mutex_) = 0;
};

}  // namespace stitch::rpc
