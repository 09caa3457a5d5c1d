#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/agent/incoming_call.h"
#include "stitch/rpc/future/future.h"
#include "stitch/rpc/message/owned_object.h"
#include "stitch/rref/carried_refs.h"
#include "stitch/rref/handle.h"
#include "stitch/rref/lifetime/lifetime.h"

namespace stitch::rref {

[[nodiscard]] inline WorkerLife life_of(const WorkerInfo& info) {
  return {info.id.value(), info.epoch};
}

// One worker's remote references: lets the lifetime protocol ride on the messages of rpc, and
// serves requests about objects. Shared by the agent's extension, by handles and by messages;
// handles may outlive the worker, everything is lost then. Thread contract: any thread. Lock order:
// none; its lock and that of Lifetime are never held together or across a call out.
class RRefAgent : public std::enable_shared_from_this<RRefAgent> {
 public:
  explicit RRefAgent(rpc::Agent& agent);
  [[nodiscard]] static std::shared_ptr<RRefAgent> of(rpc::Agent& agent);

  [[nodiscard]] Lifetime& lifetime() noexcept { return lifetime_; }
  [[nodiscard]] const WorkerInfo& self() const noexcept { return self_; }
  // Null when the worker has stopped.
  [[nodiscard]] std::shared_ptr<rpc::Agent> agent() const STITCH_EXCLUDES(mutex_);
  // Does what an event asked for: waiters here, ledgers to the timer. Objects that nobody refers to
  // any more go on the user-function threads, whoever lets go of them last.
  void perform(Effects effects);

  // ---- handles
  [[nodiscard]] HandlePtr own(rpc::OwnedObject value);
  // A handle on what a message or another handle keeps alive for the moment.
  [[nodiscard]] HandlePtr adopt(const RRefId& id);
  // The agent to make a call of `function` with. Throws why the reference cannot be used: lost (a
  // CallRefused: a handler's caller is told as it is), or this worker has shut down.
  [[nodiscard]] std::shared_ptr<rpc::Agent> require_usable(const Handle& handle,
                                                           std::string_view function) const;
  // Calls `waiter` when the creation has ended. REQUIRES: Lifetime::tracks_creation().
  void when_created(const RRefId& id, Waiter waiter) {
    perform(lifetime_.when_created(id, std::move(waiter)));
  }

  // ---- requests of ours
  // Sends `message`, a request whose result is to be kept by `to`, and returns the reference to it.
  // Throws Error when the request cannot even be made.
  [[nodiscard]] HandlePtr create(const WorkerInfo& to, const std::string& function,
                                 std::chrono::nanoseconds timeout, rpc::OutMessage message);

  // ---- from the extension
  void on_send(rpc::OutMessage& message, const WorkerInfo& to);
  void on_receive(rpc::InMessage& message);
  void on_ledger_frame(const rpc::InMessage& message);
  [[nodiscard]] bool take_over(const std::shared_ptr<rpc::IncomingCall>& call);
  void on_peer_lost(const WorkerInfo& peer, const Error& reason);
  void stop();
  // After stop(), when nothing runs any more that may use an object: those that were left then go.
  void destroy_remains();
  void debug_info(std::map<std::string, std::int64_t>& numbers) const;
  // References of a life of a worker that is not the present one are lost (G6). Throws
  // Error(protocol) for no worker at all.
  void meet_owner(const WorkerLife& owner);
  // Whether a message that a broken connection is the error of certainly did not arrive: with
  // stitch's own transports it was not written completely. TensorPipe reports the end of a message
  // when the peer has had it for a while, or never.
  [[nodiscard]] bool knows_losses() const noexcept { return knows_losses_; }
  // Why references of `owner` that arrive from `from` as lost cannot be used.
  [[nodiscard]] Error lost_at(const WorkerInfo& from, const WorkerLife& owner) const;
  // Throws why when that life of a worker is known to be over: nothing is pinned for a message that
  // cannot go.
  void require_alive(const WorkerInfo& peer) const;

 private:
  void accept_ledger(const rpc::InMessage& message, std::span<const std::byte> frame);
  [[nodiscard]] std::shared_ptr<void> box(rpc::OwnedObject value);
  void serve(const std::shared_ptr<rpc::IncomingCall>& call, const IncomingRefs& refs,
             const rpc::OwnedObject* target);
  void serve_creation(const std::shared_ptr<rpc::IncomingCall>& call, const RRefId& id,
                      void* object);
  void start_creation_timer(const std::shared_ptr<rpc::IncomingCall>& call, IncomingRefs& refs);

  void schedule_flush(const WorkerLife& peer, Urgency urgency) STITCH_EXCLUDES(mutex_);
  void flush_due() STITCH_EXCLUDES(mutex_);
  void start_ticking() STITCH_EXCLUDES(mutex_);
  void tick() STITCH_EXCLUDES(mutex_);
  void watch_kept() STITCH_EXCLUDES(mutex_);
  void register_kept() STITCH_EXCLUDES(mutex_);

  const WorkerInfo self_;
  const bool knows_losses_;
  mutable base::Mutex mutex_;
  rpc::Agent* agent_ STITCH_GUARDED_BY(mutex_);  // null after stop()
  bool ticking_ STITCH_GUARDED_BY(mutex_) = false;
  bool watching_kept_ STITCH_GUARDED_BY(mutex_) = false;
  std::vector<std::shared_ptr<void>> remains_ STITCH_GUARDED_BY(mutex_);  // objects left by stop()
  std::unordered_map<WorkerLife, rpc::Clock::time_point, WorkerLifeHash> due_
      STITCH_GUARDED_BY(mutex_);  // ledgers with a timer
  Lifetime lifetime_;
  std::atomic<std::uint64_t> ledger_frames_{0};  // sent on their own
};

// Makes every Agent constructed from now on take part. Here, so that including this header is
// enough.
int register_rref_extension();
inline const int kRRefExtension = register_rref_extension();

}  // namespace stitch::rref
