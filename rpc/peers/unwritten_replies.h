#pragma once

#include <atomic>
#include <cstddef>
#include <list>
#include <utility>

#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"

namespace stitch::rpc {

// The replies to one peer that are made and not written. Replies are never held back: they are what
// makes room. While they take half of `limit` bytes, no further handler is begun for the peer: it
// is parked. Thread contract: any thread; no lock is held while a task is called.
class UnwrittenReplies {
 public:
  explicit UnwrittenReplies(std::size_t limit) : limit_(limit) {}

  // Counts a reply, until it is written, or its tensors beside it have arrived.
  void add(std::size_t bytes) noexcept { bytes_.fetch_add(bytes); }
  void written(std::size_t bytes) noexcept STITCH_EXCLUDES(mutex_) {
    const std::size_t left = bytes_.fetch_sub(bytes) - bytes;
    if (parked_count_.load() != 0 && left <= limit_ / 4) unpark();
  }
  // Whether replies take half of the limit, or parked tasks, which go first, wait for that to end.
  [[nodiscard]] bool many() const noexcept {
    return bytes_.load(std::memory_order_relaxed) > limit_ / 2 ||
           parked_count_.load(std::memory_order_relaxed) != 0;
  }
  // Keeps `task`, which is about to make another reply, while that is so: until a half of the
  // replies is written. False, and `task` is left untouched, when it is not so.
  [[nodiscard]] bool park(base::UniqueFunction<void()>& task) STITCH_EXCLUDES(mutex_) {
    base::MutexLock lock(mutex_);
    parked_count_.fetch_add(1);  // first: who writes a reply looks at it afterwards
    if (given_up_ || (bytes_.load() <= limit_ / 2 && parked_.empty())) {
      parked_count_.fetch_sub(1);
      return false;
    }
    parked_.push_back(std::move(task));
    return true;
  }
  // The peer is lost, or this worker stops: no task is kept.
  void give_up() noexcept STITCH_EXCLUDES(mutex_) {
    {
      base::MutexLock lock(mutex_);
      given_up_ = true;
    }
    unpark();
  }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_.load(); }

 private:
  void unpark() noexcept STITCH_EXCLUDES(mutex_) {
    std::list<base::UniqueFunction<void()>> tasks;
    {
      base::MutexLock lock(mutex_);
      tasks.swap(parked_);
      parked_count_.fetch_sub(tasks.size());
    }
    for (auto& task : tasks) task();
  }

  const std::size_t limit_;
  std::atomic<std::size_t> bytes_{0};
  std::atomic<std::size_t> parked_count_{0};  // of parked_

  base::Mutex mutex_;
  std::list<base::UniqueFunction<void()>> parked_ STITCH_GUARDED_BY(mutex_);
  bool given_up_ STITCH_GUARDED_BY(mutex_) = false;
};

}  // namespace stitch::rpc
