#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_map>

#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"

namespace stitch::transport {

// How much memory the large messages take together that are on their way into an endpoint. One that
// does not fit waits for its turn, in order of asking; one that is larger than everything comes in
// alone. Shared by an endpoint's connections. Thread contract: any thread; no lock is held while
// `granted` is called.
class ReceiveBudget {
 public:
  using Id = std::uint64_t;

  explicit ReceiveBudget(std::size_t limit) : limit_(limit) {}
  // True when `id` may take `bytes`. False when it has to wait: `granted` is called when it may,
  // unless it gives back before. REQUIRES: `id` has nothing and does not wait.
  [[nodiscard]] bool take(Id id, std::size_t bytes, base::UniqueFunction<void()> granted)
      STITCH_EXCLUDES(mutex_);
  // Lets `id` in if it waits and is the next, whatever there is room for: those that have all of it
  // may never get on. False when others wait before it.
  // Does nothing, and is true, when `wait` is not the number of the wait that `id` is in.
  bool insist(Id id, std::uint64_t wait) STITCH_EXCLUDES(mutex_);
  // The number of the wait that `id` is in; 0 when it does not wait (any more).
  [[nodiscard]] std::uint64_t wait_of(Id id) const STITCH_EXCLUDES(mutex_);
  // What `id` has, and its wish for more. Does nothing when there is neither.
  void give_back(Id id) STITCH_EXCLUDES(mutex_);

  [[nodiscard]] std::size_t used() const STITCH_EXCLUDES(mutex_);

 private:
  struct Waiting {
    Id id;
    std::uint64_t number;
    std::size_t bytes;
    base::UniqueFunction<void()> granted;
  };
  [[nodiscard]] bool fits(std::size_t bytes) const STITCH_REQUIRES(mutex_) {
    return used_ == 0 || (used_ <= limit_ && bytes <= limit_ - used_);
  }

  const std::size_t limit_;
  mutable base::Mutex mutex_;
  std::size_t used_ STITCH_GUARDED_BY(mutex_) = 0;
  std::uint64_t waits_ STITCH_GUARDED_BY(mutex_) = 0;  // so far: the number of the latest
  std::unordered_map<Id, std::size_t> taken_ STITCH_GUARDED_BY(mutex_);
  std::deque<Waiting> waiting_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::transport
