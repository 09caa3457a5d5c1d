#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <utility>

#include "stitch/base/event_loop.h"
#include "stitch/base/mutex.h"

namespace stitch::rpc {

// One timer for many deadlines, set to the earliest of them. When it fires, `fire` handles what is
// due and calls watch() with the next deadline. Shared, because the timer may outlive the owner.
// Thread contract: any thread; `fire` runs on the event loop, no lock held.
class DeadlineWatch : public std::enable_shared_from_this<DeadlineWatch> {
 public:
  using Time = std::chrono::steady_clock::time_point;
  DeadlineWatch(std::weak_ptr<base::EventLoop> loop, std::function<void()> fire)
      : loop_(std::move(loop)), fire_(std::move(fire)) {}

  // Has `fire` called at `when` at the latest, or soon after. Takes no lock if the timer is set to
  // `when` or earlier already.
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
