#pragma once

#include <chrono>

namespace stitch::transport {

// How long the threads of a poller busy-poll, when they yield, and when they migrate to another
// CPU. Decides only: it makes no system call and reads no clock; times are passed in.
//
// - Own threads busy-poll for interval() after the last message. It doubles when a sleep turned out
//   to be so short that busy-polling through it would have been cheaper, and halves when a sleep
//   was long or other threads want the CPU.
// - A waiting thread that helps busy-polls as next_help() says: for longer when traffic that
//   brought it no work came soon after it had given up; briefly while CPUs are contended.
// - When several yields in a row ran another thread, this CPU is contended: two threads that wait
//   for each other by polling may share it (cpu_migration.h). An own thread then migrates, with
//   exponential back-off while that does not help.
// - While every round moves something it yields now and then, so that a thread that waits for an
//   answer just read need not wait for the next tick of the scheduler.
//
// Thread contract: not thread-safe; guarded by the poller's role.
class SpinPolicy {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::nanoseconds;
  using Microseconds = std::chrono::microseconds;
  using Milliseconds = std::chrono::milliseconds;

  // Longest interval() of an own thread: bounds the CPU time spent after the last message.
  static constexpr Microseconds kMaxInterval{100};
  // Shortest one: a few rounds, so that an answer already on its way is still seen.
  static constexpr Microseconds kMinInterval{5};
  // A sleep shorter than this would have been cheaper to busy-poll through: kMaxInterval plus about
  // what it costs to sleep and to wake up.
  static constexpr Microseconds kShortSleep{150};
  // How long a helping thread busy-polls at first: about what it costs to put it to sleep and to
  // wake it, so that it is never much worse than sleeping immediately.
  static constexpr Microseconds kHelpInterval{60};
  // The least time it busy-polls for grows up to this: a call that computes for a millisecond has
  // its answer without waking two threads.
  static constexpr Microseconds kMaxHelp{2000};
  // Helps of kMinInterval after a contended yield, before kHelpInterval is tried again.
  static constexpr int kShortHelps = 16;
  // Empty rounds before a busy-polling thread yields in each of them. One that makes system calls
  // counts as kQuickRounds that make none. What arrives is seen the sooner the shorter a round is:
  // between quick ones there is one pause instruction, and each fourth looks at the clock.
  static constexpr int kQuickRounds = 4;
  static constexpr int kRoundsBeforeYield = 8 * kQuickRounds;
  static constexpr int kPausesPerSlowRound = 8;
  // A yield longer than this ran another thread for most of a time slice: CPUs are wanted.
  static constexpr Microseconds kContendedYield{200};
  // A yield longer than this ran another thread at all; one that ran none takes less than 1 us.
  static constexpr Microseconds kSwitchedYield{4};
  // Yields in a row that ran another thread before this CPU counts as contended: one or two may be
  // a passing thread.
  static constexpr int kContendedYields = 3;
  // A CPU that was uncontended for this long was a good choice: the back-off starts anew.
  static constexpr Milliseconds kUncontendedAfter{2};
  // Time between two migrations: doubled with each one, as a migration costs cold caches.
  static constexpr Milliseconds kMinMigrationBackoff{1};
  static constexpr Milliseconds kMaxMigrationBackoff{1000};
  // Time before the next decision of a thread that stayed so that the other one may migrate.
  static constexpr Microseconds kStayBackoff{50};
  // Time between yields while every round moves something, and when the last such yield was a
  // contended one, which cost much.
  static constexpr Microseconds kBusyYieldInterval{50};
  static constexpr Microseconds kContendedBusyYieldInterval{4000};

  // How long an own thread busy-polls after the last message.
  [[nodiscard]] Duration interval() const noexcept { return interval_; }
  // How long the next helping thread busy-polls: until nothing has arrived for `interval`, and for
  // `at_least`, unless it reads work that others must do.
  struct Help {
    Duration interval;
    Duration at_least;
  };
  [[nodiscard]] Help next_help() noexcept {
    if (short_helps_ == 0) return {kHelpInterval, help_};
    --short_helps_;
    return {kMinInterval, Duration(0)};
  }
  // The last round of polling ended at `now`, on whichever thread.
  void went_idle(TimePoint now) noexcept {
    idle_since_ = now;
    gave_up_ = false;
  }
  // Then, and it was a helping thread's, which had waited for as long as `help`, of next_help(),
  // said. `only_answers`: it has read no work that others must do.
  void gave_up(const Help& help, bool only_answers) noexcept {
    gave_up_ = only_answers && help.at_least > Duration(0);
    if (!only_answers) help_ = kHelpInterval;
  }
  // Traffic ended the sleep that followed.
  void woken_by_traffic(TimePoint now) noexcept;

  struct AfterYield {
    bool contended = false;  // CPUs are wanted: ask the kernel now, then sleep
    bool migrate = false;    // to another CPU, now
  };
  // A yield after an empty round took from `begin` to `end`. `may_migrate`: the thread is the
  // poller's own; users' threads stay where they are.
  [[nodiscard]] AfterYield yielded(TimePoint begin, TimePoint end, bool may_migrate) noexcept;

  // Whether to yield although every round moves something; the last empty one was at `last_empty`.
  [[nodiscard]] bool busy_yield_due(TimePoint last_empty, TimePoint now) const noexcept {
    return now - last_empty > busy_yield_interval_;
  }
  void yielded_while_busy(TimePoint begin, TimePoint end) noexcept;

 private:
  [[nodiscard]] bool should_migrate(TimePoint begin, TimePoint end, bool may_migrate) noexcept;
  void halve_interval() noexcept;

  Duration interval_ = kMaxInterval;
  Duration help_ = kHelpInterval;
  TimePoint idle_since_;
  bool gave_up_ = false;
  int short_helps_ = 0;              // left
  Duration busy_yield_interval_{0};  // the first busy round yields
  int switched_yields_ = 0;          // in a row
  TimePoint last_contended_;
  TimePoint next_migration_;  // not before
  Duration migration_backoff_{0};
};

}  // namespace stitch::transport
