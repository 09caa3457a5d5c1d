#include "stitch/transport/gpu/launch_order.h"

namespace stitch::transport::gpu {

void LaunchOrder::changed() {
  on_change_();
  changed_.notify_all();
}

void LaunchOrder::add_pair(Pair pair, TransferOrder::End end, std::uint64_t source,
                           Launcher launcher) {
  const base::MutexLock lock(mutex_);
  order_.add_pair(pair, end, source);
  launchers_.emplace(pair, std::move(launcher));
}

std::vector<std::uint64_t> LaunchOrder::drop_pair(Pair pair) {
  Launcher launcher;  // destroyed without the lock
  const base::MutexLock lock(mutex_);
  if (const auto at = launchers_.find(pair); at != launchers_.end()) {
    launcher = std::move(at->second);
    launchers_.erase(at);
  }
  changed();
  last_end_ = Clock::now();  // the other pairs get time while the launches of this one are aborted
  return order_.drop_pair(pair);
}

LaunchOrder::Entered LaunchOrder::announce(Pair pair, std::uint64_t number) {
  const base::MutexLock lock(mutex_);
  if (holders_ > 0) return {std::nullopt, true};
  return {order_.announce(pair, number, Clock::now())};
}

LaunchOrder::Entered LaunchOrder::accept(Pair pair, std::uint64_t number, std::uint64_t clock) {
  const base::MutexLock lock(mutex_);
  if (holders_ > 0) return {std::nullopt, true};
  changed();
  return {order_.accept(pair, number, clock)};
}

bool LaunchOrder::agree(Pair pair, std::uint64_t number, std::uint64_t clock) {
  const base::MutexLock lock(mutex_);
  changed();
  return order_.agree(pair, number, clock);
}

bool LaunchOrder::withdraw(Pair pair, std::uint64_t number) {
  const base::MutexLock lock(mutex_);
  changed();
  return order_.withdraw(pair, number);
}

void LaunchOrder::finish(Pair pair) {
  const base::MutexLock lock(mutex_);
  changed();
  last_end_ = Clock::now();
  order_.finish(pair);
}

std::vector<LaunchOrder::Pair> LaunchOrder::overdue(std::chrono::nanoseconds age) const {
  const base::MutexLock lock(mutex_);
  return order_.overdue(Clock::now() - age);
}

std::size_t LaunchOrder::pending() const {
  const base::MutexLock lock(mutex_);
  return order_.pending();
}

std::size_t LaunchOrder::launched() const {
  const base::MutexLock lock(mutex_);
  return order_.launched();
}

std::optional<std::pair<LaunchOrder::Launcher, std::uint64_t>> LaunchOrder::next() {
  const base::MutexLock lock(mutex_);
  const auto launch = order_.launch();
  if (!launch) return std::nullopt;
  if (order_.launched() == 1) last_end_ = Clock::now();
  return std::pair(launchers_.at(launch->pair), launch->key.number);
}

std::chrono::nanoseconds LaunchOrder::standing_still() const {
  const base::MutexLock lock(mutex_);
  return order_.launched() > 0 ? Clock::now() - last_end_ : std::chrono::nanoseconds(0);
}

bool LaunchOrder::acquire(Clock::time_point deadline) {
  const base::MutexLock lock(mutex_);
  ++holders_;
  const auto busy = [this]() STITCH_REQUIRES(mutex_) {
    return order_.pending() > 0 || order_.launched() > 0;
  };
  while (busy() && changed_.wait_until(mutex_, deadline)) {
  }
  if (!busy()) return true;
  --holders_;
  return false;
}

void LaunchOrder::release() {
  const base::MutexLock lock(mutex_);
  --holders_;
}

bool LaunchOrder::held() const {
  const base::MutexLock lock(mutex_);
  return holders_ > 0;
}

}  // namespace stitch::transport::gpu
