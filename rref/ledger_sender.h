#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>

#include "stitch/base/mutex.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rref/lifetime/lifetime.h"
#include "stitch/rref/single_timer.h"

namespace stitch::rref {

// Runs the timers of the lifetime protocol: sends the ledger frames that no other message carried
// in time, resends unacknowledged ones, and registers borrows that last. Shared with its timers,
// which may run after its owner is gone. An idle worker has no timer. Thread contract: any thread;
// its lock is never held across a call to the agent or to Lifetime.
class LedgerSender : public std::enable_shared_from_this<LedgerSender> {
 public:
  LedgerSender(rpc::Agent& agent, std::shared_ptr<Lifetime> lifetime);
  // Starts the timers for what `effects` asks for in `flush` and `kept`.
  void schedule(const Effects& effects);
  // No timer does anything afterwards.
  void stop();
  // Ledger frames that were messages of their own.
  [[nodiscard]] std::uint64_t frames_sent() const noexcept { return frames_sent_.load(); }

 private:
  // Null after stop().
  [[nodiscard]] std::shared_ptr<rpc::Agent> agent() const STITCH_EXCLUDES(mutex_);
  void flush(rpc::Agent& agent, const WorkerLife& peer) STITCH_EXCLUDES(mutex_);
  void set_timer(const WorkerLife& peer, Urgency urgency) STITCH_EXCLUDES(mutex_);
  void schedule_flush(const WorkerLife& peer, Urgency urgency) noexcept STITCH_EXCLUDES(mutex_);
  void flush_due() STITCH_EXCLUDES(mutex_);
  void start_ticking() STITCH_EXCLUDES(mutex_);
  void tick() STITCH_EXCLUDES(mutex_);
  void watch_kept() STITCH_EXCLUDES(mutex_);
  void register_kept() STITCH_EXCLUDES(mutex_);

  const std::shared_ptr<Lifetime> lifetime_;
  mutable base::Mutex mutex_;
  rpc::Agent* agent_ STITCH_GUARDED_BY(mutex_);  // null after stop()
  // Peers whose ledger has a timer, and when it fires.
  std::map<WorkerLife, rpc::Clock::time_point, std::less<>,
           base::ReservedAllocator<std::pair<const WorkerLife, rpc::Clock::time_point>>>
      due_ STITCH_GUARDED_BY(mutex_);
  SingleTimer tick_timer_, kept_timer_;
  std::atomic<std::uint64_t> frames_sent_{0};
};

}  // namespace stitch::rref
