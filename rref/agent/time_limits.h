#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

#include "stitch/base/event_loop.h"
#include "stitch/base/mutex.h"
#include "stitch/base/recycler.h"
#include "stitch/base/unique_function.h"
#include "stitch/rpc/calls/deadline_heap.h"

namespace stitch::rref {

// The time limits of creations, and of waits for them, on one worker: one timer for all of them,
// since most end long before their limit. Shared with its timer. Thread contract: any thread; no
// lock is held while a limit that has passed is reported.
class TimeLimits : public std::enable_shared_from_this<TimeLimits> {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // One limit. Neither moved nor copied while it is in here; remove() is called before it is
  // destroyed.
  struct Limit {
    base::UniqueFunction<void()> passed;  // called once, on the event loop
    std::size_t heap_place = rpc::DeadlineHeap<Limit>::kNowhere;
    [[nodiscard]] static void* operator new(std::size_t bytes) {
      return base::take_recycled(bytes);
    }
    static void operator delete(void* at, std::size_t bytes) noexcept { base::recycle(at, bytes); }
  };

  // `loop`: the worker's, the same at each call.
  void add(Limit& limit, Time deadline, base::EventLoop& loop) STITCH_EXCLUDES(mutex_);
  // Does nothing for one that was not added or has passed.
  void remove(Limit& limit) noexcept STITCH_EXCLUDES(mutex_);
  // Drops all limits and what would be called for them.
  void close() noexcept STITCH_EXCLUDES(mutex_);

 private:
  void expire(Time when, base::EventLoop& loop) STITCH_EXCLUDES(mutex_);
  void set_timer(Time when, base::EventLoop& loop);

  base::Mutex mutex_;
  Time next_ STITCH_GUARDED_BY(mutex_) = Time::max();  // when the timer fires
  rpc::DeadlineHeap<Limit> heap_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::rref
