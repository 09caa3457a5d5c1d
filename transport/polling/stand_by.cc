#include "stitch/transport/polling/stand_by.h"

#include <algorithm>
#include <utility>

namespace stitch::transport {

void StandBy::woken(TimePoint now) noexcept {
  const Duration after(now.time_since_epoch().count() -
                       released_at_.load(std::memory_order_relaxed));
  vain_.store(after < kVainWakeUp ? vain_.load() + 1 : 0);
}

// end() clears active_ before it hands off what is watched for the last time: it sees this work, or
// this thread sees that none stands by.
DoWork StandBy::begin_piece(DeferredWork& work, bool& watched) {
  if (!active_.load() || !work_is_short_.load(std::memory_order_relaxed)) return DoWork::here;
  if (!watched) {
    base::MutexLock lock(mutex_);
    watched_ = &work;
    watched = true;
  }
  count(pieces_);
  return active_.load() ? DoWork::here_watched : DoWork::here;
}

bool StandBy::end_work(int pieces, bool watched, TimePoint now) {
  if (watched) {
    if (pieces > 1) uses_.fetch_add(1, std::memory_order_relaxed);
    base::MutexLock lock(mutex_);
    watched_ = nullptr;
    return false;
  }
  if (pieces <= 1) return false;
  const Duration took(now.time_since_epoch().count() -
                      released_at_.load(std::memory_order_relaxed));
  const int vain = std::max(0, vain_.load() + (took < pieces * kShortPiece ? 1 : -1));
  vain_.store(vain);
  return vain >= kVainWakeUps && !active_.load() &&
         now.time_since_epoch().count() >= not_before_.load();
}

bool StandBy::begin(TimePoint now) noexcept {
  if (vain_.load() < kVainWakeUps || now.time_since_epoch().count() < not_before_.load() ||
      active_.exchange(true)) {
    return false;
  }
  began_ = now;
  seen_ = {role_changes_.load(std::memory_order_relaxed), uses_.load(std::memory_order_relaxed),
           pieces_.load(std::memory_order_relaxed)};
  ticks_ = 0;
  useful_ = true;
  worked_ = false;
  slow_ticks_ = 0;
  help_ticks_ = 0;
  return true;
}

bool StandBy::tick() {
  watch_work();
  if (++ticks_ % kTicksOfUse == 0) {
    const std::uint32_t uses = uses_.load(std::memory_order_relaxed);
    useful_ = uses - std::exchange(seen_.uses, uses) >= kTicksOfUse / 4;
  }
  const std::uint32_t changes = role_changes_.load(std::memory_order_relaxed);
  return changes == std::exchange(seen_.role_changes, changes) || !useful_;
}

void StandBy::watch_work() {
  const std::uint32_t pieces = pieces_.load(std::memory_order_relaxed);
  const std::uint32_t begun = pieces - std::exchange(seen_.pieces, pieces);
  if (help_ticks_ > 0 && --help_ticks_ == 0) work_is_short_.store(true);
  const bool works = [this] {
    base::MutexLock lock(mutex_);
    return watched_ != nullptr;
  }();
  const bool worked = std::exchange(worked_, works);
  if (!works || !worked || begun >= kFewPieces) {
    slow_ticks_ = 0;
    return;
  }
  hand_off();
  slow_ticks_ = std::min(slow_ticks_ + 1, kSlowTicks);
  if (slow_ticks_ < kSlowTicks) return;
  work_is_short_.store(false);
  help_ticks_ = kTicksOfHelp;
}

void StandBy::hand_off() noexcept {
  base::MutexLock lock(mutex_);
  if (watched_ != nullptr) (*watched_)(DoWork::elsewhere);
}

void StandBy::end(TimePoint now) {
  if (useful_ && now - began_ >= kUseful) {
    backoff_ = {};
    vain_.store(kVainWakeUps - 1);  // it may be of use again soon
  } else {
    backoff_ = std::clamp<Duration>(backoff_ * 2, kMinBackoff, kMaxBackoff);
    not_before_.store((now + backoff_).time_since_epoch().count());
    vain_.store(0);
  }
  work_is_short_.store(true);
  active_.store(false);
  hand_off();
}

}  // namespace stitch::transport
