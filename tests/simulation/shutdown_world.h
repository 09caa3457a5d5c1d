// One file, though long: what the workers of a history do, and how they come and go.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "stitch/rpc/agent/shutdown_protocol.h"
#include "tests/simulation/shutdown_simulation.h"

namespace stitch::rpc::shutdown_simulation {

using Protocol = ShutdownProtocol;
using Step = Protocol::Step;
using simulation::Duration;
using simulation::Task;
using simulation::Time;
using std::chrono::microseconds;
using std::chrono::milliseconds;

// How late a worker's own thread may run.
inline constexpr milliseconds kSlack{40};
// What has happened so long ago, every worker has learned of.
inline constexpr milliseconds kKnownAfter{400};
inline constexpr milliseconds kLongestDelay{30};
inline constexpr milliseconds kSlowDelay{150};  // so that POLL is repeated
inline constexpr milliseconds kLongStep{200};
inline constexpr milliseconds kStillReading{1};  // when a loss is noticed
inline constexpr milliseconds kReadingSlowly{8};

// Its name, whichever life it is.
inline WorkerInfo worker_named(WorkerId id) { return {"w" + std::to_string(id.value()), id, 1}; }

// What a message of the application starts.
struct Work {
  enum class Kind : std::uint8_t { notify, call, reply } kind = Kind::notify;
  int depth = 0;           // how many more messages it may cause, one after the other
  std::uint64_t call = 0;  // of a call and a reply
  unsigned excepted = 0;   // bit n: leader n need not have known of it, see rule 1
};

// Workers are known by their ids, slots here; each node is one life of a worker. A former life has
// died before the next one begins.
class World : public simulation::History {
 protected:
  static constexpr std::size_t kMaxNodes = 9;
  struct Handler {
    Work work;
    std::size_t caller = 0;
    int steps = 0;    // messages that it will send
    int waiting = 0;  // for answers
    bool hangs = false;
  };
  struct Call {
    std::size_t to = 0;
    std::uint64_t handler = 0;  // 0: the program made it
    unsigned excepted = 0;
  };
  using Lives = std::vector<std::size_t>;  // the present one in each slot
  struct Node {
    std::size_t slot = 0;
    std::uint64_t epoch = 1;
    std::optional<Protocol> protocol;
    std::optional<Time> begin;
    Duration limit{};
    bool patient = false;  // waits for others without a limit
    Time deadline{};       // of its waiting, where it is not patient
    bool dead = false, ended = false, go_received = false;
    bool closing = false;                     // what is lost is not said any more
    Lives known;                              // as this one knows them
    std::map<std::size_t, Time> known_since;  // lives that have come back
    std::set<std::size_t> learning;           // lives that have come back
    std::set<std::size_t> lost;
    std::map<std::size_t, Time> lost_at;
    std::set<std::size_t> loss_told;  // to the protocol
    std::uint64_t sent = 0, received = 0, served = 0;
    std::map<std::uint64_t, Call> calls;
    std::map<std::uint64_t, Handler> handlers;
    std::uint64_t events = 0;  // as GracefulShutdown counts them
    bool waits = false;
    std::uint64_t wakes = 0;
    // As a leader.
    std::set<std::size_t> polled, told;
    bool heard_of_loss = false;
    std::uint64_t last_round = 0;
  };
  struct Link {  // from one life to another
    Duration delay{};
    std::array<Time, 2> last{};  // arrival, of small messages and large ones
    std::optional<Time> passes_until;
    bool noticing = false;  // that it is over
  };
  struct Packet {
    std::size_t from = 0, to = 0;
    Work work;
  };

  World(std::uint64_t number, Wrong wrong) : History(number), wrong_(wrong) {}

  // ---- the rules
  virtual void begins_round(std::size_t leader, const Protocol::Effects& effects,
                            const Lives& lives) = 0;
  virtual void said_go(std::size_t leader, const Protocol::Effects& effects,
                       const Lives& lives) = 0;
  virtual void check_end_of(std::size_t at_node) = 0;

  // ---- time and names
  microseconds of_any_size(microseconds shortest, Duration longest) {
    const double ratio = std::chrono::duration<double>(longest) / shortest;
    return microseconds(static_cast<std::int64_t>(static_cast<double>(shortest.count()) *
                                                  std::pow(ratio, pick(1000) / 999.0)));
  }
  // The next thing that a thread does; another may come in between.
  void next(Task action) {
    if (one_in(2)) return action();
    after(up_to(one_in(16) ? microseconds(5000) : microseconds(200)), std::move(action));
  }
  [[nodiscard]] bool running(std::size_t at) const { return !nodes_[at].dead && !nodes_[at].ended; }
  [[nodiscard]] Link& link(std::size_t from, std::size_t to) {
    return links_[from * kMaxNodes + to];
  }
  [[nodiscard]] WorkerId id_of(std::size_t node) const {
    return WorkerId(static_cast<std::uint32_t>(nodes_[node].slot));
  }
  [[nodiscard]] WorkerInfo info_of(std::size_t node) const {
    WorkerInfo info = worker_named(id_of(node));
    info.epoch = nodes_[node].epoch;
    return info;
  }
  std::string name_of(std::size_t node) const {
    const Node& named = nodes_[node];
    const std::string epoch = named.epoch == 1 ? "" : " epoch " + std::to_string(named.epoch);
    return "w" + std::to_string(named.slot) + epoch;
  }
  std::size_t present(std::size_t slot) const {
    std::size_t last = slot;
    for (std::size_t i = slots_; i < nodes_.size(); ++i) {
      if (nodes_[i].slot == slot) last = i;
    }
    return last;
  }
  std::size_t add_node(std::size_t slot) {
    const std::size_t node = nodes_.size();
    Node& added = nodes_.emplace_back();
    added.slot = slot;
    for (std::size_t i = 0; i < slots_; ++i) added.known.push_back(i);
    for (const Node& each : nodes_) {
      if (&each != &added && each.slot == slot) added.epoch = each.epoch + 1;
    }
    added.protocol.emplace(info_of(node), worker_named);
    return node;
  }
  // Calls shutdown.
  void will_begin(std::size_t node, Time when) {
    Node& one = nodes_[node];
    one.begin = when;
    one.limit = std::chrono::seconds(30);
    if (hanging_limits_) one.limit = milliseconds(400) + up_to(milliseconds(200));
    if (some_only_) one.limit = milliseconds(200) + up_to(milliseconds(400));
    if (short_limits_ && one_in(2)) one.limit = up_to(milliseconds(300));
    one.patient = patient_;
    one.deadline = when + one.limit;
    last_begin_ = std::max(last_begin_, when);
    at(when, [this, node] { begin(node); });
  }
  void will_work(std::size_t node, Time from) {
    for (int k = pick(8); k > 0; --k) {
      at(from + of_any_size(microseconds(50), milliseconds(150)), [this, node] {
        const Node& sender = nodes_[node];
        if (running(node) && !(sender.begin && now_ >= *sender.begin))
          send_work(node, nullptr, 1 + pick(12));
      });
    }
  }
  std::size_t any_slot() { return pick(slots_); }

  // ---- connections

  // When it arrives, if it does.
  void carry(std::size_t from, std::size_t to, bool large, Task arrive) {
    Link& over = link(from, to);
    if (!running(to)) notice(from, to);
    Time& last = over.last[large ? 1 : 0];
    last = std::max(last, now_ + over.delay / 2 + up_to(over.delay / 2) +
                              (large ? up_to(kLongestDelay) : microseconds(0)));
    // What is sent into a connection that is over does not arrive.
    if (over.passes_until) return;
    at(last, [this, from, to, arrive = std::move(arrive)]() mutable {
      const Link& came_over = link(from, to);
      if (came_over.passes_until && now_ > *came_over.passes_until) return;
      if (!running(to)) return;
      // Its reader may have begun with it when it was lost.
      const auto lost = nodes_[to].lost_at.find(from);
      if (lost == nodes_[to].lost_at.end() || lost->second + kStillReading > now_) arrive();
    });
  }
  // `from` and `to` lose each other; some of what is on its way still arrives.
  void end_link(std::size_t from, std::size_t to, bool silently) {
    if (from == to || link(from, to).passes_until) return;
    link(from, to).passes_until = now_ + up_to(milliseconds(2));
    link(to, from).passes_until = now_ + up_to(milliseconds(2));
    const auto calls = [&](std::size_t a, std::size_t b) {
      return std::any_of(nodes_[a].calls.begin(), nodes_[a].calls.end(),
                         [b](const auto& call) { return call.second.to == b; });
    };
    // With no connection open, the one learns of it only when it needs one.
    if (!silently || calls(from, to)) notice(from, to);
    if (!silently || calls(to, from)) notice(to, from);
  }
  void notice(std::size_t at_node, std::size_t peer) {
    if (at_node == peer || std::exchange(link(at_node, peer).noticing, true)) return;
    after(of_any_size(microseconds(50), milliseconds(60)), [this, at_node, peer] {
      Node& node = nodes_[at_node];
      if (!running(at_node)) return;
      node.lost.insert(peer);
      node.lost_at[peer] = now_;
      next([this, at_node, peer] {
        Node& told = nodes_[at_node];
        for (auto it = told.calls.begin(); it != told.calls.end();) {
          const auto each = it++;
          if (each->second.to == peer) answered(at_node, each->first);
        }
        next([this, at_node, peer] {
          Node& node_now = nodes_[at_node];
          node_now.loss_told.insert(peer);
          if (node_now.closing) return;
          node_now.protocol->on_peer_lost(info_of(peer));
          wake(at_node);
        });
      });
    });
  }
  void die(std::size_t at_node, bool returns) {
    if (!running(at_node)) return;
    nodes_[at_node].dead = true;
    count("deaths");
    note(name_of(at_node), " dies");
    const bool silently = one_in(3);
    for (std::size_t i = 0; i < nodes_.size(); ++i) end_link(i, at_node, silently);
    if (returns) {
      after(of_any_size(microseconds(500), milliseconds(500)),
            [this, slot = nodes_[at_node].slot] { come_back(slot); });
    }
  }
  void cut(std::size_t a, std::size_t b) {
    if (a == b || !running(a) || !running(b)) return;
    count("cuts");
    note(name_of(a), " and ", name_of(b), " lose each other");
    end_link(a, b, false);
  }

  // ---- lives

  // As a new life, if there is a world to come back to.
  void come_back(std::size_t slot) {
    const std::size_t former = present(slot);
    bool world = false;
    for (std::size_t i = 0; i < nodes_.size(); ++i) world = world || running(i);
    if (!world || !nodes_[former].dead || nodes_.size() == kMaxNodes) return;
    const std::size_t joiner = add_node(slot);
    Node& node = nodes_[joiner];
    for (std::size_t i = 0; i < slots_; ++i) {
      const std::size_t other = node.known[i] = present(i);
      if (other == joiner || running(other)) continue;
      end_link(other, joiner, true);
      // Members know that it is gone, or it has to be found out.
      if (one_in(2)) {
        node.lost.insert(other);
        node.lost_at[other] = now_;
        node.loss_told.insert(other);
      }
    }
    start_when_known(joiner);
  }
  // Once all members know it.
  void start_when_known(std::size_t joiner) {
    if (!running(joiner)) return;
    bool known = true;
    bool lowest = true;
    bool alone = true;
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      Node& node = nodes_[i];
      if (i == joiner || !running(i)) continue;
      alone = false;
      lowest = lowest && node.slot > nodes_[joiner].slot;
      if (node.known[nodes_[joiner].slot] == joiner) continue;
      known = false;
      if (node.learning.insert(joiner).second)
        after(up_to(milliseconds(10)), [this, i, joiner] { learn(i, joiner); });
    }
    if (!known) return after(milliseconds(1), [this, joiner] { start_when_known(joiner); });
    if (alone) {
      nodes_[joiner].dead = true;
      return;
    }
    count("returns");
    if (lowest) count("lowest_returns");
    if (!(some_only_ && one_in(3)))
      will_begin(joiner, now_ + of_any_size(microseconds(100), milliseconds(300)));
    will_work(joiner, now_);
  }
  // It is a member once its former life is lost.
  void learn(std::size_t at_node, std::size_t joiner) {
    if (!running(at_node)) return;
    Node& node = nodes_[at_node];
    std::size_t& known = node.known[nodes_[joiner].slot];
    if (nodes_[known].epoch >= nodes_[joiner].epoch) return;  // it has heard of a later one
    if (!node.loss_told.contains(known)) {
      notice(at_node, known);
      return after(up_to(milliseconds(1)), [this, at_node, joiner] { learn(at_node, joiner); });
    }
    WorkerInfo former = info_of(joiner);
    --former.epoch;
    node.protocol->on_peer_lost(former);
    known = joiner;
    node.known_since[joiner] = now_;
    next([this, at_node] {
      nodes_[at_node].protocol->on_peer_joined();
      wake(at_node);
    });
  }

  // ---- the application

  void send_work(std::size_t from, Handler* handler, int depth, std::uint64_t handler_id = 0) {
    Node& node = nodes_[from];
    const std::size_t to = node.known[any_slot()];
    if (node.lost.contains(to)) return;
    Work work{.depth = depth, .excepted = handler == nullptr ? 0 : handler->work.excepted};
    if (one_in(2)) {
      work.kind = Work::Kind::call;
      work.call = ++last_id_;
      node.calls[work.call] = {to, handler_id, work.excepted};
      if (handler != nullptr) ++handler->waiting;
    }
    transmit(from, to, work);
  }
  void transmit(std::size_t from, std::size_t to, Work work) {
    ++nodes_[from].sent;
    count("messages");
    note(name_of(from), " sends to ", name_of(to));
    for (std::size_t leader = 0; leader < nodes_.size(); ++leader) {
      if (!nodes_[leader].polled.empty() && !nodes_[leader].polled.contains(from))
        work.excepted |= 1U << leader;
    }
    const std::uint64_t number = ++last_id_;
    if (!link(from, to).passes_until) packets_[number] = {from, to, work};
    carry(from, to, one_in(4), [this, number] { arrive(number); });
  }
  void arrive(std::uint64_t number) {
    const Packet packet = packets_.at(number);
    const std::size_t to = packet.to;
    const auto count = [this, to] { ++nodes_[to].received; };
    const auto handle = [this, packet, to, number] {
      packets_.erase(number);
      if (!running(to)) return;
      if (packet.work.kind == Work::Kind::reply) return answered(to, packet.work.call);
      const std::uint64_t id = ++last_id_;
      Handler handler{packet.work, packet.from};
      handler.steps = packet.work.depth > 0 ? pick(3) : 0;
      handler.hangs = hangs_left_ > 0 && one_in(10);
      if (handler.hangs) --hangs_left_, hanging_ = to, hanging_since_ = now_;
      ++nodes_[to].served;
      nodes_[to].handlers[id] = handler;
      after(of_any_size(microseconds(10), milliseconds(10)), [this, to, id] { handle_on(to, id); });
    };
    if (wrong_ == Wrong::counts_received_first) {
      count();
      return after(up_to(milliseconds(40)), handle);
    }
    handle();
    next(count);
  }
  void handle_on(std::size_t at_node, std::uint64_t id) {
    Node& node = nodes_[at_node];
    const auto found = node.handlers.find(id);
    if (!running(at_node) || found == node.handlers.end() || found->second.hangs) return;
    Handler& handler = found->second;
    if (handler.steps > 0) {
      --handler.steps;
      send_work(at_node, &handler, handler.work.depth - 1 - pick(3), id);
    }
    if (handler.steps == 0 && handler.waiting == 0) {
      const Handler ended = handler;
      node.handlers.erase(found);
      if (ended.work.kind == Work::Kind::call && !node.lost.contains(ended.caller))
        transmit(at_node, ended.caller,
                 {Work::Kind::reply, 0, ended.work.call, ended.work.excepted});
      --node.served;
    } else if (handler.steps > 0) {
      after(of_any_size(microseconds(10), one_in(8) ? kLongStep : milliseconds(3)),
            [this, at_node, id] { handle_on(at_node, id); });
    }
  }
  void answered(std::size_t at_node, std::uint64_t id) {
    Node& node = nodes_[at_node];
    const auto call = node.calls.find(id);
    if (call == node.calls.end()) return;
    const std::uint64_t handler = call->second.handler;
    node.calls.erase(call);
    const auto found = node.handlers.find(handler);
    if (found == node.handlers.end()) return;
    --found->second.waiting;
    if (found->second.steps == 0) handle_on(at_node, handler);
  }

  // ---- what GracefulShutdown does

  void begin(std::size_t at_node) {
    if (!running(at_node)) return;
    note(name_of(at_node), " calls shutdown");
    const Node& node = nodes_[at_node];
    nodes_[at_node].protocol->begin(node.patient ? Time::max() : node.deadline, node.limit);
    loop(at_node);
  }
  void loop(std::size_t at_node) {
    nodes_[at_node].waits = false;
    const std::uint64_t seen = nodes_[at_node].events;
    const std::uint64_t changes = nodes_[at_node].protocol->changes();
    next([this, at_node, seen, changes] {
      Protocol::View view{.changes = changes, .live = {}};
      const Lives lives = nodes_[at_node].known;
      for (const std::size_t each : lives) {
        if (!nodes_[at_node].lost.contains(each)) view.live.insert(id_of(each));
      }
      next([this, at_node, seen, view = std::move(view), lives] {
        if (!running(at_node)) return;
        const auto effects = nodes_[at_node].protocol->on_time(now_, view);
        const bool sample = effects.sample;
        // A leader that is alone begins a round each time without asking.
        std::uint64_t& round = nodes_[at_node].last_round;
        const bool asks =
            !effects.sends.empty() && effects.sends[0].message.step == Step::poll &&
            std::exchange(round, effects.sends[0].message.round) < effects.sends[0].message.round;
        if (asks || (sample && view.live.size() == 1)) begins_round(at_node, effects, lives);
        carry_out(at_node, effects, lives);
        if (!sample) return wait(at_node, seen);
        read_status(at_node, [this, at_node, seen, lives](const Protocol::Status& own) {
          if (own.lost != 0) nodes_[at_node].heard_of_loss = true;
          const auto answer = nodes_[at_node].protocol->on_sample(now_, own);
          if (answer.expect_closing) said_go(at_node, answer, lives);
          // The record of the world ends first.
          next([this, at_node, seen, lives, answer] {
            if (!running(at_node)) return;
            carry_out(at_node, answer, lives);
            wait(at_node, seen);
          });
        });
      });
    });
  }

  void wait(std::size_t at_node, std::uint64_t seen) {
    Node& node = nodes_[at_node];
    if (!running(at_node)) return;
    if (node.protocol->ended()) return end(at_node);
    if (node.events != seen) return after(microseconds(1), [this, at_node] { loop(at_node); });
    node.waits = true;
    const std::uint64_t wake = ++node.wakes;
    at(std::max(now_, node.protocol->next()) + up_to(microseconds(200)), [this, at_node, wake] {
      const Node& woken = nodes_[at_node];
      if (running(at_node) && woken.waits && woken.wakes == wake) loop(at_node);
    });
  }
  void wake(std::size_t at_node) {
    Node& node = nodes_[at_node];
    ++node.events;
    if (!std::exchange(node.waits, false)) return;
    after(up_to(microseconds(50)), [this, at_node] {
      if (running(at_node)) loop(at_node);
    });
  }
  void read_status(std::size_t at_node, std::function<void(const Protocol::Status&)> then) {
    const Node& node = nodes_[at_node];
    Protocol::Status status{.busy = node.calls.size() + node.served};
    next([this, at_node, status, then = std::move(then)]() mutable {
      const Node& read = nodes_[at_node];
      if (!running(at_node)) return;
      status.sent = read.sent;
      status.received = read.received;
      status.lost = read.lost.size();
      then(status);
    });
  }

  // `lives`: those to which the sends are.
  void carry_out(std::size_t at_node, const Protocol::Effects& effects, const Lives& lives) {
    if (effects.expect_closing) nodes_[at_node].closing = true;
    for (const auto& each : effects.sends) {
      const std::size_t to = lives[each.to.value()];
      if (each.message.step != Step::status) {
        send(at_node, to, each.message);
        continue;
      }
      read_status(at_node, [this, at_node, to, said = each.message](const auto& own) mutable {
        said.status = own;
        send(at_node, to, said);
      });
    }
    for (const WorkerId id : effects.reach) {
      const std::size_t peer = nodes_[at_node].known[id.value()];
      if (!running(peer)) notice(at_node, peer);
    }
  }
  void send(std::size_t from, std::size_t to, const Protocol::Message& said) {
    if (nodes_[from].lost.contains(to) || (flaky_ && one_in(20))) return;
    carry(from, to, false, [this, from, to, said] {
      // A reader may be at the last messages of a life for long, while the next one joins.
      if (!nodes_[from].dead || one_in(2)) return receive(from, to, said);
      after(up_to(kReadingSlowly), [this, from, to, said] {
        if (running(to)) receive(from, to, said);
      });
    });
  }
  void receive(std::size_t from, std::size_t to, const Protocol::Message& said) {
    Node& node = nodes_[to];
    if (said.step == Step::status && said.status.lost != 0) node.heard_of_loss = true;
    Protocol::Effects effects;
    try {
      effects = node.protocol->on_message(info_of(from), said);
    } catch (const Error& error) {
      return fail(name_of(to), " refused: ", error.what());
    }
    if (effects.may_close) node.go_received = true;
    Lives lives = node.known;
    lives[nodes_[from].slot] = from;
    carry_out(to, effects, lives);
    if (said.step == Step::poll) return;
    next([this, to, may_close = effects.may_close] {
      if (may_close) nodes_[to].protocol->on_answered();
      wake(to);
    });
  }
  void end(std::size_t at_node) {
    Node& node = nodes_[at_node];
    check_end_of(at_node);
    node.ended = true;
    note(name_of(at_node), " ends");
    node.polled.clear();
    for (std::size_t i = 0; i < nodes_.size(); ++i) end_link(i, at_node, one_in(4));
  }
  const Wrong wrong_;
  std::uint64_t last_id_ = 0;
  std::size_t slots_ = 0;
  std::vector<Node> nodes_;
  std::array<Link, kMaxNodes * kMaxNodes> links_;
  std::map<std::uint64_t, Packet> packets_;  // on their way
  bool flaky_ = false;                       // messages of the shutdown may fail to be sent
  bool all_in_time_ = false;                 // all live ones call shutdown, and nothing hangs
  bool short_limits_ = false, hanging_limits_ = false, some_only_ = false;
  bool patient_ = false;
  Time last_begin_{};
  int hangs_left_ = 0;
  std::optional<std::size_t> hanging_;
  Time hanging_since_{};
};

}  // namespace stitch::rpc::shutdown_simulation
