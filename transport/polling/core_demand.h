#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

namespace stitch::transport {

// Whether other threads want the cores on which this process would poll.
//
// The rule: a thread that waits polls while a core is free for it, and blocks in the kernel as soon
// as another thread wants that core. A thread that polls uses up its share of the core and then
// waits for a whole slice of the scheduler, milliseconds; a thread that blocks has its share left
// and runs as soon as it is woken, ahead of threads that compute.
//
// A thread that polls and lost its core for a millisecond, twice within 10 ms, lost it to a
// thread that computes: the cores count as wanted for 4 ms, and for twice as long after each loss
// that follows at once, up to 400 ms. Meanwhile a thread that waits reads the count of runnable
// threads (/proc/loadavg) once a millisecond; under an affinity mask or a cpuset the count says
// nothing.
//
// Thread contract: any thread; lock-free.
class CoreDemand {
 public:
  using Clock = std::chrono::steady_clock;
  // Whether runnable threads could use all the cores now; nothing where the system does not tell.
  using Probe = std::optional<bool> (*)() noexcept;

  explicit CoreDemand(Probe probe) noexcept : probe_(probe) {}
  // The demand on this machine.
  [[nodiscard]] static CoreDemand& of_this_process();

  // Time between two probes.
  static constexpr std::chrono::milliseconds kProbeInterval{1};
  // A thread that did not run for longer, although it wanted to, has lost its core to a thread that
  // computes: threads that wait give it back within less, slices of the scheduler are longer.
  static constexpr std::chrono::microseconds kLoss{1000};
  // A loss without another loss within this time was a loss to a passing thread.
  static constexpr std::chrono::milliseconds kPassing{10};
  // Cores count as wanted for so long after a loss.
  static constexpr std::chrono::milliseconds kMinBlock{4};
  static constexpr std::chrono::milliseconds kMaxBlock{400};

  // Whether a thread that waits is to block. May ask for the demand.
  [[nodiscard]] bool wanted(Clock::time_point now) noexcept {
    if (were_wanted() &&
        now.time_since_epoch().count() >= next_probe_.load(std::memory_order_relaxed)) [[unlikely]]
      update(now, false);
    return were_wanted();
  }
  // The result of the last wanted().
  [[nodiscard]] bool were_wanted() const noexcept {
    return wanted_.load(std::memory_order_relaxed);
  }
  // The calling thread polled, and lost its core until `now`.
  void lost_core(Clock::time_point now) noexcept { update(now, true); }

 private:
  using Ticks = Clock::duration::rep;
  void update(Clock::time_point now, bool lost) noexcept;

  const Probe probe_;
  std::atomic<bool> wanted_{false};
  std::atomic<Ticks> next_probe_{0};
  // The process, by its number of forks, in which a thread updates the state; a child has none.
  std::atomic<std::uint64_t> prober_{0};
  // Of that thread.
  Clock::duration block_{kMinBlock};
  Clock::time_point blocked_until_{};
  Clock::time_point last_loss_{};
};

}  // namespace stitch::transport
