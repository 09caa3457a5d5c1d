#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/rpc/membership/digests.h"
#include "stitch/rpc/membership/member_card.h"
#include "stitch/rpc/membership/notice.h"
#include "stitch/rpc/message/worker_info.h"

namespace stitch::rpc {

// The members of the world, as one worker knows them: silence, suspicion, verdicts, joins and
// leaves. PROTOCOL.md has the rules and the guarantees. Pure state without a thread or a clock;
// events return effects. Owned by MembershipService, or by a simulation. Not thread-safe.
class MembershipProtocol {
 public:
  using Clock = std::chrono::steady_clock;
  using Time = Clock::time_point;
  // The interval of the heartbeats that each worker sends over each connection.
  [[nodiscard]] static Clock::duration heartbeat_interval(Clock::duration heartbeat_timeout) {
    return std::min<Clock::duration>(heartbeat_timeout / 4, std::chrono::milliseconds(500));
  }
  struct Settings {
    // A worker that is silent for so long is suspected; also the limit of one probe.
    Clock::duration heartbeat_timeout = std::chrono::seconds(10);
    // The error of a `joiner` that cannot be a member beside `live`. A pure function, or empty.
    std::function<std::optional<Error>(const MemberCard& joiner,
                                       const std::vector<MemberCard>& live)>
        admit{};
  };
  // News for the layers above, in this order.
  struct Event {
    enum class Kind : std::uint8_t { joined, dead, left, fenced };
    Kind kind;
    MemberCard card;
    Error reason;  // of dead and fenced
  };
  // The end of an admission.
  struct Answer {
    std::uint64_t ticket;
    WorkerInfo joiner;
    std::optional<Error> refusal{};  // nothing: all live members know the joiner
    bool elsewhere = false;          // this worker cannot admit any more; another worker can
  };
  // A new connection to a life, which shows whether it answers within `limit`.
  struct Probe {
    WorkerInfo about;
    Clock::duration limit;
  };
  // Actions for after the lock, in the order of the fields, before the effects of later events.
  struct Effects {
    std::vector<std::pair<WorkerInfo, Error>> lose;  // end the connection; it fails its calls
    std::vector<Event> events;
    std::vector<std::pair<WorkerInfo, Notice>> send;  // reliably, while the link holds
    // Workers to connect to, unless there is a connection; a failure is no loss.
    std::vector<WorkerInfo> reach;
    std::vector<Probe> probes;  // each answered by on_probe()
    std::vector<Answer> answers;
    bool leave_done = false;
    // Whether the events say that this worker has left; it waits for the end of its connections.
    [[nodiscard]] bool has_left(const WorkerInfo& worker) const {
      return std::ranges::any_of(events, [&worker](const Event& event) {
        return event.kind == Event::Kind::left && event.card.info == worker;
      });
    }
    [[nodiscard]] bool empty() const noexcept {
      return lose.empty() && events.empty() && send.empty() && reach.empty() && probes.empty() &&
             answers.empty() && !leave_done;
    }
  };
  // A connection to a life in another process at a tick, unless it is being replaced.
  struct Link {
    WorkerId id;
    std::uint64_t epoch;
    Time heard;         // the last arrival of bytes
    bool bound = true;  // false: there has been none yet
  };

  // `self` is a member, or will be.
  MembershipProtocol(MemberCard self, Settings settings);

  // ---- events. All of them may return effects.
  // The other members at the start, without events. Lives that are over are `dead` or `left`.
  void start(std::span<const KnownLife> lives);
  // A tick comes kTicks times in a heartbeat interval.
  [[nodiscard]] Effects on_tick(Time now, std::span<const Link> links) {
    return collect([&](Effects& effects) { on_tick(now, links, effects); });
  }
  static constexpr int kTicks = 2;
  // The last connection to a life is over.
  [[nodiscard]] Effects on_link_lost(const WorkerInfo& peer, const Error& reason, Time now) {
    return collect([&](Effects& effects) { on_link_lost(peer, reason, now, effects); });
  }
  [[nodiscard]] Effects on_notice(const WorkerInfo& from, const Notice& notice, Time now) {
    return collect([&](Effects& effects) { on_notice(from, notice, now, effects); });
  }
  // A verdict on this worker has come over a connection whose peer is not proven. The protocol asks
  // that peer over a connection that this worker opens.
  [[nodiscard]] Effects on_unproven_verdict(const WorkerInfo& from) {
    return collect([&](Effects& effects) {
      Entry* const entry = over() ? nullptr : find(from);
      if (entry != nullptr && entry->alive()) confirm(*entry, effects);
    });
  }
  [[nodiscard]] Effects on_heartbeat(const WorkerInfo& from, const Digests& digests, Time now) {
    return collect([&](Effects& effects) { on_heartbeat(from, digests, now, effects); });
  }
  // The outcome of a probe: whether the life has answered; nothing for an unknown outcome.
  // `connected`: the life has a bound connection by now.
  [[nodiscard]] Effects on_probe(const WorkerInfo& about, std::optional<bool> answered, Time now,
                                 bool connected = false) {
    return collect([&](Effects& effects) { on_probe(about, answered, now, connected, effects); });
  }
  // A worker asks to become a member. One Answer with this ticket follows.
  [[nodiscard]] Effects admit(std::uint64_t ticket, const MemberCard& card, Time now) {
    return collect([&](Effects& effects) { admit(ticket, card, now, effects); });
  }
  // The lives of the world, from the welcome of `by` to this worker.
  [[nodiscard]] Effects on_lives(std::span<const KnownLife> lives, const WorkerInfo& by, Time now) {
    return collect([&](Effects& effects) {
      if (!over()) merge(lives, by, now, effects);
    });
  }
  // This worker leaves: leave_done follows, at the latest after the heartbeat timeout.
  [[nodiscard]] Effects leave(Time now) {
    return collect([&](Effects& effects) { leave(now, effects); });
  }

  // ---- state
  [[nodiscard]] const WorkerInfo& self() const noexcept { return self_.info; }
  [[nodiscard]] const std::optional<Error>& fenced() const noexcept { return fenced_; }
  // Digests of the lives, equal at two workers with the same knowledge; see on_heartbeat().
  [[nodiscard]] const Digests& digests() const noexcept { return digests_; }
  // The last life of each worker, this one among them, by id.
  [[nodiscard]] std::vector<KnownLife> lives() const;
  [[nodiscard]] std::vector<MemberCard> live_cards() const;
  // Nothing for an unknown id or epoch; a former life is dead unless it left.
  [[nodiscard]] std::optional<LifeState> state(const WorkerInfo& info) const;
  // The notice for a life that connects: its end, or the end of this worker; nothing for neither.
  [[nodiscard]] std::optional<Notice> obituary(const WorkerInfo& info) const;

 private:
  struct Entry {
    KnownLife life;
    std::optional<Error> unreachable{};  // why the connection is over
    Time heard{};                        // as of the last tick; never earlier than before
    // Before the first connection (R1a):
    bool unconnected = false;             // as of the last tick
    std::optional<Time> awaited_since{};  // beginning of the wait for it
    std::optional<Time> reached_at{};     // this worker's last attempt to open it
    bool absent = false;                  // suspected because it did not come
    bool doubted = false;                 // a probe has failed, which alone proves nothing
    // While it is suspected:
    std::set<WorkerId> askers{};      // workers that wait for the verdict
    std::optional<WorkerId> asked{};  // the worker that this one has asked
    Time asked_at{};                  // the last question or answer
    bool probing = false;
    Time probed_at{};
    bool undecided = false;               // the last probe has failed on this worker's side
    bool confirming = false;              // a probe is under way that decides nothing
    std::optional<Time> answers_since{};  // probes, though the connection is over
    // Of its heartbeats:
    int mismatches = 0;  // in a row that had other digests
    Time listed_at{};    // when it was last sent a list
    int lists = 0;       // that it was sent since the digests were last equal
    [[nodiscard]] const WorkerInfo& info() const noexcept { return life.card.info; }
    [[nodiscard]] bool alive() const noexcept { return life.state == LifeState::alive; }
    [[nodiscard]] bool suspected() const noexcept {
      return alive() && (unreachable || !askers.empty());
    }
    [[nodiscard]] bool within_reach() const noexcept { return alive() && !unreachable; }
  };
  struct Joining {
    std::uint64_t ticket;
    MemberCard card;
    bool announced = false;        // else the former life is being probed
    std::set<WorkerId> pending{};  // members that have not acknowledged the joiner
    Time deadline{};
  };

  // A judge that does not answer is asked again after so many timeouts.
  static constexpr int kAskAgain = 2;
  // A judge that has lost its connection to a life that still answers declares the life dead after
  // so many timeouts; until then it learns of its other losses.
  static constexpr int kGivesUp = 1;

  template <class Change>
  [[nodiscard]] static Effects collect(Change&& change) {
    Effects effects;
    change(effects);
    return effects;
  }
  // The events above.
  void on_tick(Time now, std::span<const Link> links, Effects& effects);
  void on_link_lost(const WorkerInfo& peer, const Error& reason, Time now, Effects& effects);
  void on_notice(const WorkerInfo& from, const Notice& notice, Time now, Effects& effects);
  void on_heartbeat(const WorkerInfo& from, const Digests& digests, Time now, Effects& effects);
  void on_probe(const WorkerInfo& about, std::optional<bool> answered, Time now, bool connected,
                Effects& effects);
  void admit(std::uint64_t ticket, const MemberCard& card, Time now, Effects& effects);
  void leave(Time now, Effects& effects);

  [[nodiscard]] bool over() const noexcept { return fenced_.has_value(); }
  [[nodiscard]] Entry* find(const WorkerInfo& info);
  [[nodiscard]] Entry* find(WorkerId id);
  // The summand of a life in its digest.
  [[nodiscard]] static std::uint64_t summand(const WorkerInfo& info, bool over);
  [[nodiscard]] std::uint64_t& digest_of(WorkerId id) { return digests_[id.value() % kDigests]; }
  void insert(const KnownLife& life);
  void erase(const Entry& entry);
  // About the size of a life in a LIST.
  [[nodiscard]] static std::size_t bytes_of(const KnownLife& life);
  // Whether a life may be passed on: other workers refuse names and ids that are taken, and a LIST
  // has to fit into a frame.
  [[nodiscard]] bool may_keep(const KnownLife& life) const;
  static constexpr std::size_t kMaxBytes = std::size_t{8} << 20;
  void end_life(Entry& entry, LifeState state);
  void tell_all(const Notice& notice, Effects& effects) const;
  void lose(Entry& entry, const Error& reason, Effects& effects);
  void after_loss(const WorkerInfo& lost, Time now, Effects& effects);
  // The judge of a life, and the judge of all lives (R2), perhaps this worker.
  [[nodiscard]] WorkerId judge_of(const Entry& entry) const { return lowest(&entry, false); }
  [[nodiscard]] WorkerId judge() const { return lowest(nullptr, false); }
  [[nodiscard]] WorkerId lowest(const Entry* but_for, bool absent_too) const;
  void watch(Entry& entry, WorkerId decider, Time now, Effects& effects);
  void end_absence(Entry& entry);
  void pursue(Entry& entry, Time now, Effects& effects);
  void begin_probe(Entry& entry, Time now, Effects& effects);
  void ask_witnesses(const Entry& entry, Time now, Effects& effects) const;
  // A probe or a connection has shown that the worker lives.
  void end_doubt(Entry& entry) {
    end_absence(entry);
    entry.doubted = false;
  }
  // Whether bytes came over the link within the timeout.
  [[nodiscard]] bool hears(const Entry& entry, Time now) const;
  // Whether a new life of the worker waits for the verdict.
  [[nodiscard]] bool is_awaited(const Entry& entry) const;
  // Whether this process was paused during the probe that ends now.
  [[nodiscard]] bool slept(const Entry& entry, Time now) const;
  void answer_askers(Entry& entry, const Notice& answer, Effects& effects);
  [[nodiscard]] bool gives_up(Entry& entry, Time now) const;
  void declare(Entry& entry, const WorkerInfo& by, const std::string& verdict, Time now,
               Effects& effects);
  void mark_left(Entry& entry, Time now, Effects& effects);
  void confirm(Entry& entry, Effects& effects);
  void on_suspect(const WorkerInfo& from, const Notice& notice, Time now, Effects& effects);
  void on_dead(const WorkerInfo& from, const Notice& notice, Time now, Effects& effects);
  void fence(const std::string& verdict, Effects& effects);
  void add(const KnownLife& life, const WorkerInfo& by, Time now, Effects& effects);
  void merge(std::span<const KnownLife> lives, const WorkerInfo& by, Time now, Effects& effects);
  // The error of a worker that cannot be a member.
  [[nodiscard]] std::optional<Error> refusal(const MemberCard& card) const;
  void announce(Joining& joining, Time now, Effects& effects);
  // Of several new lives of a worker that have waited for the end of the former one, the last
  // joins.
  void announce_last(WorkerId id, Time now, Effects& effects);
  // New lives of a worker that is alive cannot join.
  void refuse_joins(const WorkerInfo& alive, Effects& effects);
  void answer_joins(Time now, Effects& effects);
  void acknowledged(WorkerId by, const WorkerInfo& about);
  void finish_leave(Effects& effects);
  [[nodiscard]] bool isolated(WorkerId besides) const;

  const MemberCard self_;
  const Settings settings_;
  std::map<WorkerId, Entry> entries_;  // the last life of each other worker
  Digests digests_{};                  // of all lives; the next two are of the other workers
  std::unordered_map<std::string, WorkerId> ids_;
  std::size_t bytes_ = 0;
  std::map<std::uint64_t, Joining> joining_;
  std::optional<Time> last_tick_;
  Time awake_since_{};  // the end of the last pause of this process
  std::optional<Error> fenced_;
  std::optional<Time> leave_deadline_;
  bool leaving_ = false;  // from leave() on
  std::set<WorkerId> leave_pending_;
};

}  // namespace stitch::rpc
