#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rref/agent/ledger_sender.h"
#include "stitch/rref/agent/object_access.h"
#include "stitch/rref/agent/time_limits.h"
#include "stitch/rref/lifetime/lifetime.h"

namespace stitch::rref {

[[nodiscard]] inline WorkerLife life_of(const WorkerInfo& info) {
  return {info.id.value(), info.epoch};
}

// One worker's remote references: its part in the lifetime protocol, its handles, and what it knows
// of the lives of its peers. Shared by the agent's extension, by handles and by messages. Handles
// may outlive the worker; all of them are lost then. Thread contract: any thread. Lock order: none;
// its lock, that of LedgerSender and that of Lifetime are never held together, nor while the agent,
// the transport or user code is called.
class RRefAgent : public std::enable_shared_from_this<RRefAgent> {
 public:
  explicit RRefAgent(rpc::Agent& agent);

  [[nodiscard]] Lifetime& lifetime() noexcept { return *lifetime_; }
  [[nodiscard]] const WorkerInfo& self() const noexcept { return self_; }
  // Null after stop(). Takes no lock, but for the first time.
  [[nodiscard]] std::shared_ptr<rpc::Agent> agent() const STITCH_EXCLUDES(mutex_);
  // As agent(). Throws Error(shutting_down) instead of returning null.
  [[nodiscard]] std::shared_ptr<rpc::Agent> require_agent() const STITCH_EXCLUDES(mutex_);
  // Does what an event of lifetime() asked for: calls waiters on this thread, has unreferenced
  // objects destroyed on the user-function threads, schedules ledgers.
  void carry_out(Effects effects) noexcept;
  // Whether this is a user-function thread that destroys unreferenced objects.
  [[nodiscard]] static bool destroys_here() noexcept;

  [[nodiscard]] TimeLimits& time_limits() noexcept { return *time_limits_; }
  // The memory of objects owned here, where it is known, has changed by so much.
  void add_bytes_known(std::int64_t bytes) noexcept { bytes_known_.fetch_add(bytes); }

  // A new handle for an object that a message or another handle keeps alive at the moment.
  [[nodiscard]] HandlePtr adopt(const RRefId& id);
  // Calls `waiter` when the creation has ended. REQUIRES: Lifetime::tracks_creation().
  void when_created(const RRefId& id, Waiter waiter) {
    carry_out(lifetime_->when_created(id, std::move(waiter)));
  }

  // Records what happened to references to an object, for dumps.
  void record(const char* what, const RRefId& id, std::string_view made_by = {}) const noexcept {
    events_->record(what, id.owner.id, id.owner.epoch, id.k, made_by);
  }

  // ---- the lives of peers
  // Why a reference that has come to an object of that life is lost: the life is over (G6), or is
  // not known here yet, which loses the reference in this message only.
  [[nodiscard]] std::optional<Error> why_not_owner(const WorkerLife& owner) const;
  // Whether a message whose connection broke certainly did not arrive: with stitch's own transports
  // it was not written completely. TensorPipe reports the end of a message some time after the peer
  // received it, or never.
  [[nodiscard]] bool knows_losses() const noexcept { return knows_losses_; }
  // Why the reference cannot be used, with the present epoch of its owner if that has come back;
  // nothing if it can.
  [[nodiscard]] std::optional<Error> loss_of(const RRefId& id) const;
  // Why references of `owner` that arrive as lost from `from` cannot be used.
  [[nodiscard]] Error loss_told_by(const WorkerInfo& from, const WorkerLife& owner) const;
  // Throws the reason if that life of a worker is known to be over: nothing is pinned for a message
  // that cannot be sent.
  void require_alive(const WorkerInfo& peer) const;

  // ---- from the extension
  // Throws Error(protocol) if the frame is malformed or breaks the rules.
  void accept_ledger(const WorkerInfo& from, std::span<const std::byte> frame);
  void on_peer_lost(const WorkerInfo& peer, const Error& reason);
  // That life of a worker is over for the whole world.
  void on_member_over(const WorkerInfo& member, const std::string& why);
  void on_member_joined(const WorkerInfo& joined);
  void stop();
  // After stop(), when no handler runs that may use an object: destroys the remaining objects.
  void destroy_remaining();
  void debug_info(std::map<std::string, std::int64_t>& numbers) const;
  // The objects that are being created, here or for this worker, for reports. Not looked for among
  // more than kMaxListed references.
  [[nodiscard]] rpc::Table unfinished() const;
  static constexpr std::size_t kMaxListed = 100'000;
  // The worker of `life`; its name is empty if it is not known.
  [[nodiscard]] WorkerInfo info_of(const WorkerLife& life) const;
  // The same; kept as long as this. Takes no lock for the life that it was last called for.
  [[nodiscard]] const WorkerInfo& known_info_of(const WorkerLife& life) const
      STITCH_EXCLUDES(infos_mutex_);

 private:
  void destroy(std::vector<std::shared_ptr<void>> objects) noexcept;

  const WorkerInfo self_;
  const bool knows_losses_;
  const std::shared_ptr<base::EventRing> events_;
  const std::shared_ptr<Lifetime> lifetime_;
  const std::shared_ptr<LedgerSender> ledgers_;
  const std::shared_ptr<TimeLimits> time_limits_ = std::make_shared<TimeLimits>();
  std::atomic<std::int64_t> bytes_known_{0};
  mutable base::Mutex mutex_;
  rpc::Agent* agent_ STITCH_GUARDED_BY(mutex_);  // null after stop()
  // The same, for agent(): constant once `agent_known_`; not to be used once `stopped_`.
  mutable std::weak_ptr<rpc::Agent> weak_agent_;
  mutable std::atomic<bool> agent_known_{false};
  std::atomic<bool> stopped_{false};
  // Objects that still existed at stop().
  std::vector<std::shared_ptr<void>> remaining_ STITCH_GUARDED_BY(mutex_);
  mutable base::Mutex infos_mutex_;
  using Infos = std::unordered_map<WorkerLife, WorkerInfo, WorkerLifeHash>;
  mutable Infos infos_ STITCH_GUARDED_BY(infos_mutex_);
  // Of lives of which nothing but id and epoch was known.
  mutable Infos unnamed_infos_ STITCH_GUARDED_BY(infos_mutex_);
  // One of infos_, which are never removed: the one that was last asked for. Null at first.
  mutable std::atomic<const WorkerInfo*> last_info_{nullptr};
};

}  // namespace stitch::rref
