#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "stitch/base/mutex.h"
#include "stitch/transport/deferred_work.h"

namespace stitch::transport {

// When an own thread of a poller stands by, and what it sees then (see Poller). Makes no system
// call and reads no clock; times are passed in.
//
// - Threads that are woken soon after the role was released are woken in vain: most often the
//   thread that released it would have been back as soon. So are threads that are woken for what is
//   left of deferred work that takes microseconds. After some of these an own thread stands by.
// - It looks once a tick, and takes the role when that has been free for a whole one, when it is
//   woken, and when standing by is of no use.
// - It stops when standing by is of no use: nothing has arrived while no thread polled, and no
//   deferred work had more than a piece.
// - Pieces of deferred work are done as here_watched meanwhile. When only few were done in a tick,
//   what is left is handed to other threads; when that goes on, so is what is left of all work for
//   a while, at once.
//
// Thread contract: any thread, unless said otherwise.
class StandBy {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::steady_clock::duration;
  using Microseconds = std::chrono::microseconds;
  using Milliseconds = std::chrono::milliseconds;

  // The thread that stands by looks once in this time; so no thread polls for twice as long at
  // most. A look delays what else runs on its CPU by a few microseconds.
  static constexpr Microseconds kTick{100};
  // A wake-up so soon after a release was in vain.
  static constexpr Microseconds kVainWakeUp{30};
  // A piece of work that takes less is not worth waking another thread.
  static constexpr Microseconds kShortPiece{20};
  // Wake-ups in vain, more than others, after which a thread stands by.
  static constexpr int kVainWakeUps = 3;
  // When it has stood by for less, none stands by for a time, doubled each time.
  static constexpr Milliseconds kUseful{2};
  static constexpr Milliseconds kMinBackoff{1};
  static constexpr Milliseconds kMaxBackoff{64};
  // So many ticks decide on its use: at least a fourth as many times it must have been of use.
  static constexpr std::uint32_t kTicksOfUse = 16;
  // Pieces in a tick below which others take what is left of the work.
  static constexpr std::uint32_t kFewPieces = 5;
  // Such ticks in a row after which others are woken for all work, and for how many ticks.
  static constexpr int kSlowTicks = 4;
  static constexpr int kTicksOfHelp = 20;

  // Whether a thread stands by. It does not stop while the caller has the role.
  [[nodiscard]] bool active() const noexcept { return active_.load(); }

  // With the role: it has been taken, or is about to be released, at `now`.
  void role_taken() noexcept { count(role_changes_); }
  void role_released(TimePoint now) noexcept {
    count(role_changes_);
    released_at_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
  }
  // With the role: something had arrived when it was taken.
  void found_waiting() noexcept {
    if (active()) uses_.fetch_add(1, std::memory_order_relaxed);
  }
  // An own thread has been woken by traffic.
  void woken(TimePoint now) noexcept;

  // By the own thread that has taken `work` to do it without the role, before each piece: how that
  // is to be done. `watched`: its own, false before the first piece.
  [[nodiscard]] DoWork begin_piece(DeferredWork& work, bool& watched) STITCH_EXCLUDES(mutex_);
  // By the same, when `pieces` of it have been done. True when the other own thread is to be woken
  // so that it stands by.
  [[nodiscard]] bool end_work(int pieces, bool watched, TimePoint now) STITCH_EXCLUDES(mutex_);

  // By an own thread that is about to sleep: whether it stands by instead. Then it waits for a
  // tick, calls tick(), and so on, until end().
  [[nodiscard]] bool begin(TimePoint now) noexcept;
  // True when it should try to take the role.
  [[nodiscard]] bool tick() STITCH_EXCLUDES(mutex_);
  // With the role, or when the poller ends.
  void end(TimePoint now) STITCH_EXCLUDES(mutex_);

 private:
  // Of a counter that one thread at a time writes.
  static void count(std::atomic<std::uint32_t>& counter) noexcept {
    counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  void watch_work() STITCH_EXCLUDES(mutex_);
  void hand_off() noexcept STITCH_EXCLUDES(mutex_);

  std::atomic<bool> active_{false};
  std::atomic<std::uint32_t> role_changes_{0};
  std::atomic<std::uint32_t> uses_{0};         // how often a wake-up was saved
  std::atomic<Duration::rep> released_at_{0};  // the role
  std::atomic<int> vain_{0};                   // wake-ups in vain, less others
  std::atomic<Duration::rep> not_before_{0};   // begin()

  std::atomic<std::uint32_t> pieces_{0};   // of watched work, begun
  std::atomic<bool> work_is_short_{true};  // so that what is left of it may wait
  base::Mutex mutex_;
  DeferredWork* watched_ STITCH_GUARDED_BY(mutex_) = nullptr;

  // Of the thread that stands by.
  struct Seen {
    std::uint32_t role_changes = 0;
    std::uint32_t uses = 0;
    std::uint32_t pieces = 0;
  };
  Seen seen_;  // at the last tick; uses: when it was last decided
  TimePoint began_;
  std::uint32_t ticks_ = 0;
  bool useful_ = true;
  bool worked_ = false;  // on watched work, at the last tick
  int slow_ticks_ = 0;   // in a row
  int help_ticks_ = 0;   // left
  Duration backoff_{0};
};

}  // namespace stitch::transport
