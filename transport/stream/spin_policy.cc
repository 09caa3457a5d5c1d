#include "stitch/transport/stream/spin_policy.h"

#include <algorithm>
#include <utility>

namespace stitch::transport {

void SpinPolicy::halve_interval() noexcept {
  interval_ = std::max<Duration>(interval_ / 2, kMinInterval);
}

void SpinPolicy::woken_by_traffic(TimePoint now) noexcept {
  if (std::exchange(gave_up_, false)) {
    help_ = now - idle_since_ < kMaxHelp ? std::min<Duration>(help_ * 2, kMaxHelp)
                                         : std::max<Duration>(help_ / 2, kHelpInterval);
  }
  if (now - idle_since_ > kShortSleep) {
    halve_interval();
  } else {
    interval_ = std::min<Duration>(interval_ * 2, kMaxInterval);
  }
}

SpinPolicy::AfterYield SpinPolicy::yielded(TimePoint begin, TimePoint end,
                                           bool may_migrate) noexcept {
  AfterYield after;
  after.migrate = should_migrate(begin, end, may_migrate);
  after.contended = end - begin > kContendedYield;
  if (after.contended) {
    halve_interval();
    short_helps_ = kShortHelps;
    help_ = kHelpInterval;
  }
  return after;
}

bool SpinPolicy::should_migrate(TimePoint begin, TimePoint end, bool may_migrate) noexcept {
  switched_yields_ = end - begin > kSwitchedYield ? switched_yields_ + 1 : 0;
  if (switched_yields_ < kContendedYields) return false;
  if (begin - std::exchange(last_contended_, end) > kUncontendedAfter)
    migration_backoff_ = kMinMigrationBackoff;
  if (!may_migrate || end < next_migration_) return false;
  // Only one of two threads that share a CPU should migrate: the clock's low bits toss a coin.
  const bool stay = (end.time_since_epoch().count() / 32) % 2 == 0;
  if (stay) {
    next_migration_ = end + kStayBackoff;
    return false;
  }
  next_migration_ = end + migration_backoff_;
  migration_backoff_ = std::min<Duration>(migration_backoff_ * 2, kMaxMigrationBackoff);
  return true;
}

void SpinPolicy::yielded_while_busy(TimePoint begin, TimePoint end) noexcept {
  busy_yield_interval_ =
      end - begin > kContendedYield ? kContendedBusyYieldInterval : kBusyYieldInterval;
}

}  // namespace stitch::transport
