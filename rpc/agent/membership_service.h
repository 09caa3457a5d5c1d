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
#include "stitch/rpc/agent/peer_table.h"
#include "stitch/rpc/membership/membership_protocol.h"
#include "stitch/rpc/message/message.h"

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
  void set_hooks(MembershipHooks hooks) {
    hooks_ = std::move(hooks);
    joining_.store(hooks_.joins);
  }
  void start(const std::vector<Member>& members);
  // Of this worker, MembershipProtocol's.
  [[nodiscard]] std::chrono::nanoseconds heartbeat_interval() const;
  // The first tick follows. Needs the peers.
  void begin_ticks();
  // Makes this worker known to all live members of the world of set_hooks(), and takes in what they
  // know. Returns nothing then; else the refusal of a member that knows a later life, `lives[0]`:
  // with a later epoch it may join. Blocks. Throws Error: disconnected when no member can be
  // reached, already_exists or invalid_argument for any other refusal, timeout.
  [[nodiscard]] std::optional<Notice> join(std::chrono::steady_clock::time_point deadline)
      STITCH_EXCLUDES(mutex_);
  // Whether a member of that world answers. This worker remains none. Blocks. Throws
  // Error(timeout) at the deadline, by which not all have been asked.
  [[nodiscard]] bool reaches_a_member(std::chrono::steady_clock::time_point deadline);
  // Tells all live members that this worker leaves, and waits until they know. Blocks.
  void leave(std::chrono::steady_clock::time_point deadline) STITCH_EXCLUDES(mutex_);
  // Nothing is done any more.
  void stop() noexcept { stopped_.store(true); }

  // ---- events of the agent
  // After everything else has been told.
  void on_link_lost(const WorkerInfo& peer, const Error& reason) STITCH_EXCLUDES(mutex_);
  void on_frame(InMessage message) STITCH_EXCLUDES(mutex_);
  void on_heartbeat(const WorkerInfo& from, std::uint64_t digest) STITCH_EXCLUDES(mutex_);
  // Over connections that are not bound; null for that of a probe.
  void on_notice(const std::shared_ptr<transport::Connection>& connection, const WorkerInfo& from,
                 const transport::Message& message) STITCH_EXCLUDES(mutex_);
  void on_stranger(const std::shared_ptr<transport::Connection>& connection,
                   const WorkerInfo& stranger, const transport::Message& message)
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
  struct Asked {
    bool is_there = false;  // it has answered the handshake
    Inquiry::Outcome outcome{};
  };

  // A notice as a message of its own, for connections that are not bound.
  [[nodiscard]] static transport::Message bare_message(const Notice& notice);
  // Throws Error(protocol) when `message` is no notice.
  [[nodiscard]] static Notice notice_in(const transport::Message& message);
  // Changes the protocol under the lock, and has what follows performed.
  template <class F>
  void step(F&& change) STITCH_EXCLUDES(mutex_);
  void drain() noexcept STITCH_EXCLUDES(mutex_);
  // False: a loss has to be reported first; `effects` has what is left.
  [[nodiscard]] bool perform(Effects& effects) noexcept;
  [[nodiscard]] bool tell(const MembershipProtocol::Event& event);
  void add_member(const MemberCard& card);
  void record(const char* what, const WorkerInfo& about) const noexcept;
  void send(const WorkerInfo& to, const Notice& notice);
  void probe(const MembershipProtocol::Probe& probe) STITCH_EXCLUDES(mutex_);
  void end_probe(const WorkerInfo& about, std::optional<bool> answered) STITCH_EXCLUDES(mutex_);
  void answer(const MembershipProtocol::Answer& answer) STITCH_EXCLUDES(mutex_);
  void on_join(const std::shared_ptr<transport::Connection>& connection, const MemberCard& card)
      STITCH_EXCLUDES(mutex_);
  void tick();
  void remember(const MembershipProtocol::Event& over);
  // The members that hooks_ has described, by id.
  [[nodiscard]] std::vector<MemberCard> other_members() const;
  // Null: whether it is there. Blocks.
  [[nodiscard]] Asked ask(const MemberCard& card, const Notice* question,
                          Clock::time_point deadline);
  // The end of join(): returns once what the sponsor knows has been performed.
  void take_in(const Notice& welcome, Clock::time_point deadline) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] Member see(const MemberCard& card) const;
  // That a life is dead; nothing if it is not.
  [[nodiscard]] std::optional<Notice> verdict_on(const WorkerInfo& info) const
      STITCH_EXCLUDES(mutex_);

  Agent& agent_;
  MembershipHooks hooks_;  // constant after start()
  std::atomic<bool> stopped_{false};
  std::atomic<bool> joining_{false};  // no other worker knows this one yet
  mutable base::Mutex mutex_;
  base::CondVar left_changed_;
  std::optional<MembershipProtocol> protocol_ STITCH_GUARDED_BY(mutex_);
  std::deque<Effects> queue_ STITCH_GUARDED_BY(mutex_);
  bool draining_ STITCH_GUARDED_BY(mutex_) = false;
  bool left_ STITCH_GUARDED_BY(mutex_) = false;
  std::uint64_t next_ticket_ STITCH_GUARDED_BY(mutex_) = 1;
  std::map<std::uint64_t, std::shared_ptr<transport::Connection>> tickets_
      STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::rpc
