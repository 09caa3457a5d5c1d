#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "stitch/base/mutex.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rref/lifetime/lifetime.h"

namespace stitch::rref {

// A timer of which at most one runs. Thread contract: any thread.
class SingleTimer {
 public:
  // Has `fire` run on the loop at that time, unless a timer runs already.
  template <class Fire>
  void start(base::EventLoop& loop, std::chrono::steady_clock::time_point when, Fire fire) {
    if (!runs_.exchange(true)) loop.call_at(when, std::move(fire));
  }
  [[nodiscard]] bool runs() const noexcept { return runs_.load(); }
  // `fire` calls this: from now on start() starts another one.
  void fired() noexcept { runs_.store(false); }

 private:
  std::atomic<bool> runs_{false};
};

// Runs the timers of the lifetime protocol, on the event loop: sends what the ledgers have to say,
// and registers borrows that last. Only that one thread sends ledger frames, so they reach a peer
// in order. Shared with its timers, which may run after its owner is gone. An idle worker has no
// timer. Thread contract: any thread; its lock is never held across a call to the agent or to
// Lifetime.
class LedgerSender : public std::enable_shared_from_this<LedgerSender> {
 public:
  LedgerSender(rpc::Agent& agent, std::shared_ptr<Lifetime> lifetime);
  // Starts the timers for what `effects` asks for in `flush` and `kept`.
  void schedule(const Effects& effects) noexcept;
  // No timer does anything afterwards.
  void stop();
  [[nodiscard]] std::uint64_t frames_sent() const noexcept { return frames_sent_.load(); }

 private:
  // Null after stop().
  [[nodiscard]] std::shared_ptr<rpc::Agent> agent() const STITCH_EXCLUDES(mutex_);
  void start(SingleTimer& timer, rpc::Clock::duration after, void (LedgerSender::*then)())
      STITCH_EXCLUDES(mutex_);
  void flush() STITCH_EXCLUDES(mutex_);
  void register_kept() STITCH_EXCLUDES(mutex_);

  const std::shared_ptr<Lifetime> lifetime_;
  mutable base::Mutex mutex_;
  rpc::Agent* agent_ STITCH_GUARDED_BY(mutex_);  // null after stop()
  SingleTimer flush_timer_, kept_timer_;
  std::atomic<std::uint64_t> frames_sent_{0};
};

}  // namespace stitch::rref
