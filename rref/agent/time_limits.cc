#include "stitch/rref/agent/time_limits.h"

#include <utility>

namespace stitch::rref {

void TimeLimits::add(Limit& limit, Time deadline, base::EventLoop& loop) {
  {
    const base::MutexLock lock(mutex_);
    heap_.add(limit, deadline);
    if (deadline >= next_) return;
    next_ = deadline;
  }
  set_timer(deadline, loop);
}

// The timer runs on the loop, which exists then.
void TimeLimits::set_timer(Time when, base::EventLoop& loop) {
  loop.call_at(when, [weak = weak_from_this(), when, &loop] {
    if (const auto self = weak.lock()) self->expire(when, loop);
  });
}

void TimeLimits::remove(Limit& limit) noexcept {
  const base::MutexLock lock(mutex_);
  heap_.remove(limit);
}

void TimeLimits::close() noexcept {
  for (;;) {
    base::UniqueFunction<void()> dropped;  // destroyed without the lock: it may own anything
    const base::MutexLock lock(mutex_);
    if (heap_.empty()) return;
    Limit& limit = heap_.first();
    heap_.remove(limit);
    dropped = std::move(limit.passed);
  }
}

void TimeLimits::expire(Time when, base::EventLoop& loop) {
  for (;;) {
    base::UniqueFunction<void()> passed;
    Time next;
    {
      const base::MutexLock lock(mutex_);
      if (when != next_) return;  // an earlier timer was set after this one
      next = heap_.first_deadline();
      if (next <= std::chrono::steady_clock::now()) {
        Limit& limit = heap_.first();
        heap_.remove(limit);
        passed = std::move(limit.passed);
      } else {
        next_ = next;
      }
    }
    if (!passed) {
      if (next != Time::max()) set_timer(next, loop);
      return;
    }
    passed();
  }
}

}  // namespace stitch::rref
