#include "stitch/rpc/peers/peer_budget.h"

#include <algorithm>

namespace stitch::rpc {

namespace {
// Of a budget: four of them and one message more do not leave their bits.
constexpr std::size_t kMaxBytes = std::size_t{1} << 38;
}  // namespace

PeerBudget::PeerBudget(const PeerLimits& limits)
    : limits_{std::min(limits.bytes, kMaxBytes),
              std::clamp<std::size_t>(limits.calls, 1, PeerLimits::kMaxCalls), limits.frame_bytes} {
}

// ---- room

bool PeerBudget::take(std::size_t bytes, std::size_t budgets) noexcept {
  std::uint64_t used = used_.load();
  do {
    const std::uint64_t used_bytes = used & kByteMask;
    const bool full =
        used >> kByteBits >= budgets * limits_.calls ||
        (used_bytes != 0 && used_bytes + bytes + kCallBytes > budgets * limits_.bytes);
    if (full && !given_up_.load()) return false;
  } while (!used_.compare_exchange_weak(used, used + packed(bytes)));
  return true;
}

bool PeerBudget::wait(std::size_t bytes, Clock::time_point deadline,
                      const std::function<void()>& ask) {
  waiting_.fetch_add(1);  // first: who makes room looks at it afterwards
  ask();
  base::MutexLock lock(mutex_);
  base::CondVar& turn = threads_.emplace_back();
  bool taken = false;
  for (;;) {
    taken = (given_up_.load() || &threads_.front() == &turn) && take(bytes, 1);
    if (taken || Clock::now() >= deadline) break;
    static_cast<void>(turn.wait_until(mutex_, deadline));
  }
  threads_.remove_if([&turn](const base::CondVar& each) { return &each == &turn; });
  waiting_.fetch_sub(1);
  if (!threads_.empty()) threads_.front().notify_one();
  return taken;
}

void PeerBudget::wake() noexcept {
  base::MutexLock lock(mutex_);
  if (!threads_.empty()) threads_.front().notify_one();
}

// ---- the window

bool PeerBudget::open_window(std::size_t bytes) noexcept {
  auto& unwritten = unwritten_[small(bytes)];
  if (unwritten.load() > (small(bytes) ? kSmallWindow : kLargeWindow)) return false;
  unwritten.fetch_add(bytes);
  return true;
}

void PeerBudget::send_later(std::uint64_t id, std::size_t bytes, base::UniqueFunction<bool()> go) {
  {
    base::MutexLock lock(mutex_);
    queued_[small(bytes)].fetch_add(1);  // first: who writes a request looks at it afterwards
    unsent_[small(bytes)].try_emplace(id, Unsent{bytes, std::move(go)});
  }
  pump();
}

std::optional<PeerBudget::Unsent> PeerBudget::next() {
  for (auto& requests : unsent_) {
    const auto first = requests.begin();
    if (first == requests.end()) continue;
    const std::size_t bytes = first->second.bytes;
    if (given_up_.load()) {
      unwritten_[small(bytes)].fetch_add(bytes);
    } else if (!open_window(bytes)) {
      continue;
    }
    Unsent request = std::move(first->second);
    requests.erase(first);
    return request;
  }
  return std::nullopt;
}

void PeerBudget::pump() noexcept {
  base::MutexLock lock(mutex_);
  pump_again_ = pumping_;
  if (pumping_) return;
  pumping_ = true;
  do {
    pump_again_ = false;
    while (auto request = next()) {
      lock.unlock();
      const std::size_t bytes = request->bytes;
      if (!request->go()) unwritten_[small(bytes)].fetch_sub(bytes);
      request.reset();
      queued_[small(bytes)].fetch_sub(1);  // after it was sent: until then later ones wait
      lock.lock();
    }
  } while (pump_again_);
  pumping_ = false;
}

void PeerBudget::drop(std::uint64_t id) noexcept {
  Unsent dropped;  // destroyed without the lock
  base::MutexLock lock(mutex_);
  for (auto& requests : unsent_) {
    const auto found = requests.find(id);
    if (found == requests.end()) continue;
    dropped = std::move(found->second);
    requests.erase(found);
    queued_[small(dropped.bytes)].fetch_sub(1);
  }
}

void PeerBudget::give_up() noexcept {
  {
    base::MutexLock lock(mutex_);
    given_up_.store(true);
    for (base::CondVar& turn : threads_) turn.notify_one();
  }
  pump();
}

// ---- requests of the peer

const char* PeerBudget::count_received(std::size_t bytes) noexcept {
  const std::uint64_t before = received_.fetch_add(packed(bytes));
  const std::uint64_t received = before & kByteMask;
  if (bytes > limits_.bytes ||
      (received != 0 && received + bytes + kCallBytes > kBudgets * limits_.bytes))
    return kBytesName;
  return before >> kByteBits >= kBudgets * limits_.calls ? kCallsName : nullptr;
}

PeerBudget::Numbers PeerBudget::numbers() const {
  Numbers numbers;
  const std::uint64_t used = used_.load();
  const std::uint64_t received = received_.load();
  numbers.calls = used >> kByteBits;
  numbers.bytes = used & kByteMask;
  numbers.unwritten_bytes = unwritten_[0].load() + unwritten_[1].load();
  numbers.received_calls = received >> kByteBits;
  numbers.received_bytes = (received & kByteMask) - numbers.received_calls * kCallBytes;
  base::MutexLock lock(mutex_);
  numbers.waiting = threads_.size();
  for (const auto& requests : unsent_) {
    numbers.waiting += requests.size();
    for (const auto& [id, request] : requests) numbers.waiting_bytes += request.bytes;
  }
  return numbers;
}

}  // namespace stitch::rpc
