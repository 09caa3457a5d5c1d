#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/rpc/agent/membership_hooks.h"
#include "stitch/rpc/membership/membership_protocol.h"
#include "stitch/rpc/message/message.h"
#include "stitch/rpc/peers/peer_table.h"

namespace stitch::rpc {

class Agent;

// Runs the MembershipProtocol of one worker: a timer for its looks, its frames, its probes over
// connections of their own, and the events for the extensions, in their order. Part of its Agent.
// Thread contract: any thread once start() has been called; effects are performed without its lock,
// one after another, by the thread that finds none at it.
class MembershipService {
 public:
  explicit MembershipService(Agent& agent) : agent_(agent) {}

  // Before start(). Without it, the members are what start() gets.
  void set_hooks(MembershipHooks hooks) { hooks_ = std::move(hooks); }
  void start(const std::vector<Member>& members);
  // Of this worker, MembershipProtocol's.
  [[nodiscard]] std::chrono::nanoseconds heartbeat_interval() const;
  // Has the layers above told of the lives that are over, and begins to tick. Needs the peers.
  void begin();
  // Makes `card` a member, known to all live members, and calls `done`: with why it cannot be one,
  // with false where another worker has to do that, or with true.
  using Admitted = std::function<void(const std::optional<Error>& refusal, bool here)>;
  void admit(const MemberCard& card, Admitted done) STITCH_EXCLUDES(mutex_);
  // Tells all live members that this worker leaves, and waits until they know. Blocks.
  void leave(std::chrono::steady_clock::time_point deadline) STITCH_EXCLUDES(mutex_);
  // Nothing is done any more.
  void stop() noexcept { stopped_.store(true); }

  // ---- events of the agent
  // After everything else has been told.
  void on_link_lost(const WorkerInfo& peer, const Error& reason) STITCH_EXCLUDES(mutex_);
  void on_frame(InMessage message) STITCH_EXCLUDES(mutex_);
  void on_heartbeat(const WorkerInfo& from, const Digests& digests) STITCH_EXCLUDES(mutex_);
  // Over connections that are not bound.
  void on_notice(const WorkerInfo& from, const transport::Message& message, bool opened_here)
      STITCH_EXCLUDES(mutex_);

  // ---- state
  // Without those that are dead or have left; this worker among them.
  [[nodiscard]] std::vector<MemberCard> live_cards() const STITCH_EXCLUDES(mutex_);
  // As MembershipProtocol::lives().
  [[nodiscard]] std::vector<KnownLife> lives() const STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::optional<transport::Message> obituary(const WorkerInfo& info) const
      STITCH_EXCLUDES(mutex_);

 private:
  using Clock = std::chrono::steady_clock;
  using Effects = MembershipProtocol::Effects;

  // A notice as a message of its own, for connections that are not bound.
  [[nodiscard]] static transport::Message bare_message(const Notice& notice);
  // Throws Error(protocol) when `message` is no notice.
  [[nodiscard]] static Notice notice_in(const transport::Message& message);
  // Changes the protocol under the lock, and has what follows performed.
  template <class F>
  void step(F&& change) STITCH_EXCLUDES(mutex_);
  void drain() noexcept STITCH_EXCLUDES(mutex_);
  // False: a loss has to be reported first; `effects` has what is left.
  [[nodiscard]] bool carry_out(Effects& effects) noexcept;
  [[nodiscard]] bool deliver(const MembershipProtocol::Event& event);
  void add_member(const MemberCard& card);
  void record(const char* what, const WorkerInfo& about) const noexcept;
  void send(const WorkerInfo& to, const Notice& notice);
  void probe(const MembershipProtocol::Probe& probe) STITCH_EXCLUDES(mutex_);
  void end_probe(const WorkerInfo& about, std::optional<bool> answered) STITCH_EXCLUDES(mutex_);
  void answer(const MembershipProtocol::Answer& answer) STITCH_EXCLUDES(mutex_);
  void begin_ticks();
  void tick();
  void remember(const MembershipProtocol::Event& over);
  [[nodiscard]] Member see(const MemberCard& card) const;
  // That a life is dead; nothing if it is not.
  [[nodiscard]] std::optional<Notice> verdict_on(const WorkerInfo& info) const
      STITCH_EXCLUDES(mutex_);

  Agent& agent_;
  MembershipHooks hooks_;  // constant after begin()
  std::atomic<bool> stopped_{false};
  mutable base::Mutex mutex_;
  base::CondVar left_changed_;
  std::optional<MembershipProtocol> protocol_ STITCH_GUARDED_BY(mutex_);
  std::deque<Effects> queue_ STITCH_GUARDED_BY(mutex_);
  bool draining_ STITCH_GUARDED_BY(mutex_) = false;
  bool left_ STITCH_GUARDED_BY(mutex_) = false;
  std::uint64_t next_ticket_ STITCH_GUARDED_BY(mutex_) = 1;
  std::map<std::uint64_t, Admitted> tickets_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::rpc
