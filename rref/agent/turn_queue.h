#pragma once

#include <list>
#include <utility>

#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"

namespace stitch::rref {

// Turns at one object, one after the other, in the order of wait(); no thread waits. Owned with the
// object. Thread contract: any thread; no lock is held while a turn is started.
class TurnQueue {
 public:
  using Start = base::UniqueFunction<void()>;

  // Calls `start` when the turn has come: now, or on the thread that ends the turn before it.
  // Exactly one end_turn() has to follow. `start` must not throw.
  void wait(Start start) STITCH_EXCLUDES(mutex_) {
    const base::MutexLock lock(mutex_);
    waiting_.push_back(std::move(start));
    start_next();
  }
  void end_turn() STITCH_EXCLUDES(mutex_) {
    const base::MutexLock lock(mutex_);
    taken_ = false;
    start_next();
  }

 private:
  // Inside start(), a turn may end and other turns may be queued: the outermost call starts them
  // all, so a long queue needs no deep stack.
  void start_next() STITCH_REQUIRES(mutex_) {
    if (starting_) return;
    starting_ = true;
    while (!taken_ && !waiting_.empty()) {
      Start start = std::move(waiting_.front());
      waiting_.pop_front();
      taken_ = true;
      mutex_.unlock();
      start();
      start = nullptr;
      mutex_.lock();
    }
    starting_ = false;
  }

  base::Mutex mutex_;
  bool taken_ STITCH_GUARDED_BY(mutex_) = false;
  bool starting_ STITCH_GUARDED_BY(mutex_) = false;
  std::list<Start> waiting_ STITCH_GUARDED_BY(mutex_);
};

// A turn that was started; ends it. Moved, not copied.
class Turn {
 public:
  Turn() = default;
  explicit Turn(TurnQueue& queue) noexcept : queue_(&queue) {}
  Turn(Turn&& other) noexcept : queue_(std::exchange(other.queue_, nullptr)) {}
  Turn& operator=(Turn&& other) noexcept {
    std::swap(queue_, other.queue_);
    return *this;
  }
  ~Turn() {
    if (queue_ != nullptr) queue_->end_turn();
  }

 private:
  TurnQueue* queue_ = nullptr;  // outlives this
};

}  // namespace stitch::rref
