#include "stitch/transport/stream/receive_budget.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace stitch::transport {

namespace {
// Bytes: more than any memory, but so few that sums do not wrap.
constexpr std::size_t kMaxBytes = std::size_t{1} << 56;
}  // namespace

bool ReceiveBudget::take(Id id, std::size_t bytes, base::UniqueFunction<void()> granted) {
  base::MutexLock lock(mutex_);
  bytes = std::min(bytes, kMaxBytes);
  if (!waiters_.empty() || !fits(bytes)) {
    waiters_.push_back({id, ++waits_, bytes, std::move(granted)});
    return false;
  }
  taken_.emplace(id, bytes);
  used_ += bytes;
  return true;
}

std::uint64_t ReceiveBudget::wait_of(Id id) const {
  base::MutexLock lock(mutex_);
  const auto found = std::find_if(waiters_.begin(), waiters_.end(),
                                  [id](const Waiter& each) { return each.id == id; });
  return found == waiters_.end() ? 0 : found->number;
}

bool ReceiveBudget::insist(Id id, std::uint64_t wait) {
  base::UniqueFunction<void()> granted;
  {
    base::MutexLock lock(mutex_);
    if (waiters_.empty()) return true;
    const auto is_this = [id, wait](const Waiter& each) {
      return each.id == id && each.number == wait;
    };
    if (!is_this(waiters_.front())) {
      return std::none_of(waiters_.begin(), waiters_.end(), is_this);
    }
    Waiter& first = waiters_.front();
    taken_.emplace(id, first.bytes);
    used_ += first.bytes;
    granted = std::move(first.granted);
    waiters_.pop_front();
  }
  granted();
  return true;
}

void ReceiveBudget::give_back(Id id) {
  std::vector<base::UniqueFunction<void()>> granted;
  {
    base::MutexLock lock(mutex_);
    if (const auto found = taken_.find(id); found != taken_.end()) {
      used_ -= found->second;
      taken_.erase(found);
    } else {
      const auto waiting_entry = std::find_if(waiters_.begin(), waiters_.end(),
                                              [id](const Waiter& each) { return each.id == id; });
      if (waiting_entry == waiters_.end()) return;
      waiters_.erase(waiting_entry);
    }
    while (!waiters_.empty() && fits(waiters_.front().bytes)) {
      Waiter& first = waiters_.front();
      taken_.emplace(first.id, first.bytes);
      granted.push_back(std::move(first.granted));
      used_ += first.bytes;
      waiters_.pop_front();
    }
  }
  for (auto& each : granted) each();
}

std::size_t ReceiveBudget::used() const {
  base::MutexLock lock(mutex_);
  return used_;
}

}  // namespace stitch::transport
