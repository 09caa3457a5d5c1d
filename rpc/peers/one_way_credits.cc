#include "stitch/rpc/peers/one_way_credits.h"

#include <algorithm>

#include "stitch/rpc/peers/peer_budget.h"

namespace stitch::rpc {

std::uint64_t OneWayCredits::begun(std::size_t bytes) {
  base::MutexLock lock(mutex_);
  ++sent_.calls;
  sent_.bytes += bytes;
  const std::uint64_t calls = sent_.calls - returned_.calls;
  const bool many =
      calls > limits_.calls / 8 ||
      sent_.bytes - returned_.bytes + calls * PeerBudget::kCallBytes > limits_.bytes / 8;
  return many && asked_for_ == 0 ? asked_for_ = sent_.calls : 0;
}

std::uint64_t OneWayCredits::to_ask() {
  base::MutexLock lock(mutex_);
  return sent_.calls > returned_.calls && asked_for_ == 0 ? asked_for_ = sent_.calls : 0;
}

bool OneWayCredits::failed(std::size_t bytes) noexcept {
  base::MutexLock lock(mutex_);
  if (sent_.calls == returned_.calls || sent_.bytes - returned_.bytes < bytes) return false;
  --sent_.calls;
  sent_.bytes -= bytes;
  return true;
}

OneWayCredits::Handled OneWayCredits::given_back(const Handled& handled) noexcept {
  base::MutexLock lock(mutex_);
  Handled now{std::clamp(handled.calls, returned_.calls, sent_.calls),
              std::clamp(handled.bytes, returned_.bytes, sent_.bytes)};
  if (now.calls == sent_.calls) now.bytes = sent_.bytes;
  const Handled fresh{now.calls - returned_.calls, now.bytes - returned_.bytes};
  returned_ = now;
  if (now.calls >= asked_for_) asked_for_ = 0;
  return fresh;
}

OneWayCredits::Handled OneWayCredits::report() noexcept {
  const Handled now{handled_calls_.load(), handled_bytes_.load()};
  tell_at_ = now.calls >= told_until_
                 ? kNever
                 : now.calls + std::max<std::uint64_t>(1, (told_until_ - now.calls) / 8);
  return now;
}

std::optional<OneWayCredits::Handled> OneWayCredits::handled(std::size_t bytes) noexcept {
  handled_bytes_.fetch_add(bytes);
  const std::uint64_t calls = handled_calls_.fetch_add(1) + 1;
  if (calls < tell_at_.load()) return std::nullopt;
  base::MutexLock lock(mutex_);
  if (calls < tell_at_.load()) return std::nullopt;
  return report();
}

OneWayCredits::Handled OneWayCredits::asked(std::uint64_t calls) noexcept {
  base::MutexLock lock(mutex_);
  told_until_ = calls;
  tell_at_ = 0;  // before the count is read: who counts looks at this afterwards
  return report();
}

}  // namespace stitch::rpc
