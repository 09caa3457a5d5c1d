#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_map>

#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"

namespace stitch::transport {

// Limits the memory that the large messages being received by an endpoint take together. One that
// does not fit waits, first come first served; one larger than the whole budget is received alone.
// Shared by an endpoint's connections. Thread contract: any thread; no lock is held while `granted`
// is called.
class ReceiveBudget {
 public:
  using Id = std::uint64_t;

  explicit ReceiveBudget(std::size_t limit) : limit_(limit) {}
  // True when `id` may take `bytes`. False when it has to wait: `granted` is called when it may,
  // unless give_back() comes first. REQUIRES: `id` has nothing and does not wait.
  [[nodiscard]] bool take(Id id, std::size_t bytes, base::UniqueFunction<void()> granted)
      STITCH_EXCLUDES(mutex_);
  // Admits `id` if it is the first that waits, whether there is room or not: those that hold the
  // budget may never finish. False when others wait before it. Does nothing, and returns true, when
  // `wait` is not the number of the wait that `id` is in.
  bool insist(Id id, std::uint64_t wait) STITCH_EXCLUDES(mutex_);
  // The number of the wait that `id` is in; 0 when it does not wait.
  [[nodiscard]] std::uint64_t wait_of(Id id) const STITCH_EXCLUDES(mutex_);
  // Returns what `id` has, or ends its wait. Does nothing when there is neither.
  void give_back(Id id) STITCH_EXCLUDES(mutex_);

  [[nodiscard]] std::size_t used() const STITCH_EXCLUDES(mutex_);

 private:
  struct Waiter {
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
  std::deque<Waiter> waiters_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::transport
