#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "stitch/base/mutex.h"
#include "stitch/base/task_thread.h"
#include "stitch/transport/endpoint.h"
#include "stitch/transport/faults/fault_plan.h"

namespace stitch::transport {

// What befalls one message where a test decides that: see Faults::Judge.
struct Fate {
  bool drop = false;                   // lost, while its send succeeds
  bool fail = false;                   // the connection is cut instead
  int copies = 1;                      // more than 1: duplicated
  std::chrono::microseconds delay{0};  // sent later; later messages overtake it
};

// The faults of one worker: what its FaultPlan says, applied to its connections (with_faults()) and
// to its process. Reproducible: what happens to the n-th message over the k-th connection to a peer
// depends on the seed, the two names, k and n alone. Shared by the worker and its endpoints.
// Thread contract: any thread.
class Faults {
 public:
  using Clock = std::chrono::steady_clock;

  // The time of the plan begins now. `self` is the worker's name, `epoch` that of its life, `id`
  // what judges call it. Throws
  // Error(overloaded) when the system has no thread for it.
  [[nodiscard]] static std::shared_ptr<Faults> make(FaultPlan plan, std::string self,
                                                    std::uint64_t epoch = 1, std::uint32_t id = 0);

  // For tests. From the first call of expect_judges() on, all connections of this process that are
  // made through with_faults() ask the judge, if there is one, about each message: the
  // `sequence`-th of the process from one worker id to another, on the thread that sends it, or
  // that finds the connection open, without a lock.
  using Judge = std::function<Fate(std::uint32_t from, std::uint32_t to, std::uint64_t sequence,
                                   const Message& message)>;
  static void expect_judges() noexcept;
  [[nodiscard]] static bool judges_expected() noexcept;
  static void set_judge(Judge judge);
  [[nodiscard]] static Fate judge(std::uint32_t from, std::uint32_t to, const Message& message);

  [[nodiscard]] const FaultPlan& plan() const noexcept { return plan_; }
  [[nodiscard]] std::uint32_t id() const noexcept { return id_; }
  // The worker has served one more call, or done one more step: the process may end here.
  void on_call() noexcept { strike(FaultPlan::Strike::At::call, calls_.fetch_add(1) + 1); }
  void on_step() noexcept { strike(FaultPlan::Strike::At::step, steps_.fetch_add(1) + 1); }

  // Whether the plan ends or stops the process of this worker, but of other lives of it only.
  [[nodiscard]] bool spares_this_life() const noexcept;

  // A stream of random numbers that depends on these alone; the next one by counting `n` up.
  struct Dice {
    std::uint64_t state = 0;
    [[nodiscard]] double roll(std::uint64_t n, std::uint32_t which) const noexcept;  // 0 to 1
  };
  // That of the next connection to `peer`.
  [[nodiscard]] Dice next_connection(std::string_view peer) STITCH_EXCLUDES(mutex_);
  // When what is sent to `peer` now can be delivered: now without a partition, max() for never.
  [[nodiscard]] Clock::time_point deliverable(std::string_view peer, Clock::time_point now) const;
  // Whether connections to `peer` may be cut: not that of a worker to itself, which is within the
  // process and is not replaced.
  [[nodiscard]] bool cuts(std::string_view peer) const noexcept { return peer != self_; }
  // For what is due later.
  [[nodiscard]] base::TaskThread& thread() noexcept { return thread_; }

 private:
  Faults(FaultPlan plan, std::string self, std::uint64_t epoch, std::uint32_t id);
  ~Faults() = default;
  [[nodiscard]] bool is_for_this_life(const FaultPlan::Strike& strike) const noexcept {
    return strike.worker == self_ && strike.epoch == epoch_;
  }
  void strike(FaultPlan::Strike::At at, std::uint64_t count) noexcept;

  const FaultPlan plan_;
  const std::string self_;
  const std::uint64_t epoch_;
  const std::uint32_t id_;
  const Clock::time_point begin_ = Clock::now();
  std::atomic<std::uint64_t> calls_{0};
  std::atomic<std::uint64_t> steps_{0};
  std::atomic<int> thread_id_{0};
  base::Mutex mutex_;
  std::map<std::string, std::uint64_t, std::less<>> connections_ STITCH_GUARDED_BY(mutex_);
  base::TaskThread thread_;  // last: it uses what is above
};

// `endpoint` with the faults of its worker in what it sends:
//   drop       the connection is cut instead of delivering a message
//   duplicate  the connection is cut as soon as a message is written: the sender cannot know that
//              it arrives, and whatever repeats messages over another connection repeats this one
//   delay      a message is sent later; the order stays
//   reorder    a message above 32 KiB is held back for a moment, so that smaller ones overtake it,
//              as connections allow
//   cut        each connection is cut after a random time
//   partition  what is sent is held back until the partition ends
// A connection of the worker to itself is not cut. Otherwise as `endpoint`: a connection still
// delivers each message once or breaks.
[[nodiscard]] std::unique_ptr<Endpoint> with_faults(std::unique_ptr<Endpoint> endpoint,
                                                    std::shared_ptr<Faults> faults);

}  // namespace stitch::transport
