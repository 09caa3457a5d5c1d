#include "stitch/rref/time_limits.h"

#include <utility>

namespace stitch::rref {

void TimeLimits::add(Limit& limit, Time deadline, base::EventLoop& loop) {
  Time before;
  {
    const base::MutexLock lock(mutex_);
    heap_.add(limit, deadline);
    if (deadline >= next_) return;
    before = std::exchange(next_, deadline);
  }
  try {
    set_timer(deadline, loop);
  } catch (...) {
    const base::MutexLock lock(mutex_);
    heap_.remove(limit);
    if (next_ == deadline) next_ = before;  // whose timer is there
    throw;
  }
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
      if (next == Time::max()) return;
      try {
        set_timer(next, loop);
      } catch (...) {
        const base::MutexLock lock(mutex_);
        if (next_ == next) next_ = when;  // the timer that runs now runs again
        throw;
      }
      return;
    }
    passed();
  }
}

}  // namespace stitch::rref
