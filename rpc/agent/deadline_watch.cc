#include "stitch/rpc/agent/deadline_watch.h"

#include <new>

namespace stitch::rpc {

void DeadlineWatch::watch(Time when) {
  const auto at = when.time_since_epoch().count();
  if (at >= at_.load()) return;
  const auto loop = loop_.lock();
  if (!loop) return;
  base::MutexLock lock(mutex_);
  if (at >= at_.load()) return;
  // If it throws, the old timer stays.
  const auto timer = loop->call_at(when, [self = shared_from_this(), when] { self->due(when); });
  if (timer_ != 0) static_cast<void>(loop->cancel(timer_));
  at_.store(at);
  timer_ = timer;
}

// A timer that was replaced after it had begun to run finds another time here and does nothing.
void DeadlineWatch::due(Time when) {
  {
    base::MutexLock lock(mutex_);
    if (at_.load() != when.time_since_epoch().count()) return;
    at_.store(Time::max().time_since_epoch().count());
    timer_ = 0;
  }
  try {
    fire_();
  } catch (const std::bad_alloc&) {
    {
      base::MutexLock lock(mutex_);
      at_.store(when.time_since_epoch().count());
      timer_ = 0;  // one that was set meanwhile finds another time
    }
    throw;  // the event loop runs this one again
  }
}

}  // namespace stitch::rpc
