#include "stitch/rpc/calls/deadline_watch.h"

namespace stitch::rpc {

void DeadlineWatch::watch(Time when) {
  const auto at = when.time_since_epoch().count();
  if (at >= at_.load()) return;
  const auto loop = loop_.lock();
  if (!loop) return;
  base::MutexLock lock(mutex_);
  if (at >= at_.load()) return;
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
  fire_();
}

}  // namespace stitch::rpc
