#include "tests/rpc/shutdown_simulation.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <queue>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "stitch/rpc/agent/shutdown_protocol.h"

namespace stitch::rpc::test {

namespace {

using Protocol = ShutdownProtocol;
using Step = Protocol::Step;
using Time = Protocol::Time;
using Duration = Protocol::Clock::duration;
using std::chrono::microseconds;
using std::chrono::milliseconds;

// How late a worker's own thread may run.
constexpr milliseconds kSlack{40};
// What has happened so long ago, every worker has learned of.
constexpr milliseconds kKnownAfter{400};
constexpr milliseconds kLongestDelay{30};
constexpr milliseconds kLongStep{200};
constexpr milliseconds kStillReading{1};  // when a loss is noticed
constexpr milliseconds kSlowDelay{150};   // so that POLL is repeated

WorkerInfo worker_named(WorkerId id) { return {"w" + std::to_string(id.value()), id, 1}; }

// What a message of the application starts.
struct Work {
  enum class Kind : std::uint8_t { notify, call, reply } kind = Kind::notify;
  int depth = 0;           // how many more messages it may cause, one after the other
  std::uint64_t call = 0;  // of a call and a reply
  unsigned excepted = 0;   // bit n: leader n need not have known of it, see rule 1
};

}  // namespace

class ShutdownSimulation::World {
 public:
  World(std::uint64_t seed, Wrong wrong) : random_(seed), wrong_(wrong) { set_up(); }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  std::string run() {
    for (int i = 0; i < 400'000 && failure_.empty() && !events_.empty(); ++i) {
      now_ = events_.top().at;
      const auto action = std::move(const_cast<Event&>(events_.top()).action);
      events_.pop();
      action();
      if (over()) break;
    }
    if (failure_.empty()) check_end();
    return failure_;
  }
  [[nodiscard]] const Counts& counts() const { return counts_; }

 private:
  struct Event {
    Time at;
    std::uint64_t number;
    std::function<void()> action;
    bool operator<(const Event& other) const {
      return std::pair(at, number) > std::pair(other.at, other.number);
    }
  };
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
  struct Node {
    std::optional<Protocol> protocol;
    std::optional<Time> begin;
    Time deadline{};
    bool dead = false;
    bool ended = false;
    bool go_received = false;
    std::set<std::size_t> lost;
    std::map<std::size_t, Time> lost_at;
    std::uint64_t sent = 0;
    std::uint64_t received = 0;
    std::uint64_t served = 0;
    std::map<std::uint64_t, Call> calls;
    std::map<std::uint64_t, Handler> handlers;
    std::uint64_t events = 0;  // as GracefulShutdown counts them
    bool waits = false;
    std::uint64_t wakes = 0;
    // As a leader.
    std::set<std::size_t> polled;
    std::set<std::size_t> told;
    bool heard_of_loss = false;
  };
  struct Link {  // from one worker to another
    Duration delay{};
    std::array<Time, 2> last{};  // arrival, of small messages and large ones
    std::optional<Time> passes_until;
    bool noticing = false;  // that it is over
  };
  struct Packet {
    std::size_t from = 0;
    std::size_t to = 0;
    Work work;
  };

  // ---- chance and time
  int below(int bound) { return static_cast<int>(random_() % static_cast<std::uint64_t>(bound)); }
  bool one_in(int n) { return below(n) == 0; }
  microseconds up_to(Duration longest) {
    return microseconds(
        below(static_cast<int>(std::chrono::duration_cast<microseconds>(longest).count()) + 1));
  }
  // Short ones are as likely as long ones.
  microseconds of_any_size(microseconds shortest, Duration longest) {
    const double ratio = std::chrono::duration<double>(longest) / shortest;
    return microseconds(static_cast<std::int64_t>(static_cast<double>(shortest.count()) *
                                                  std::pow(ratio, below(1000) / 999.0)));
  }
  void at(Time time, std::function<void()> action) {
    events_.push({time, ++event_number_, std::move(action)});
  }
  void after(Duration delay, std::function<void()> action) { at(now_ + delay, std::move(action)); }
  // The next thing that a thread does; another may come in between.
  void next(std::function<void()> action) {
    if (one_in(2)) return action();
    after(up_to(one_in(16) ? microseconds(5000) : microseconds(200)), std::move(action));
  }
  void fail(const std::string& what) {
    if (failure_.empty())
      failure_ = what + " at " + std::to_string((now_ - Time{}) / microseconds(1)) + " us";
  }
  [[nodiscard]] bool running(std::size_t at) const { return !nodes_[at].dead && !nodes_[at].ended; }
  [[nodiscard]] Link& link(std::size_t from, std::size_t to) { return links_[from * 5 + to]; }
  [[nodiscard]] static std::size_t index(WorkerId id) { return id.value(); }
  [[nodiscard]] static WorkerId id_of(std::size_t i) { return WorkerId(std::uint32_t(i)); }

  void set_up() {
    nodes_.resize(static_cast<std::size_t>(2 + below(4)));
    const auto profile = below(8);
    const bool short_limits = profile == 2 || profile == 7;
    const bool hanging = profile == 6 || (profile == 7 && one_in(2));
    const bool some_only = profile == 2 || (profile == 7 && one_in(3));
    flaky_ = profile == 5 || profile == 7;
    all_in_time_ = !short_limits && !hanging && !some_only;
    hangs_left_ = hanging ? 1 : 0;
    for (Link& each : links_) {
      each.delay = of_any_size(microseconds(10), one_in(16) ? kSlowDelay : kLongestDelay);
    }
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      Node& node = nodes_[i];
      node.protocol.emplace(worker_named(id_of(i)), worker_named);
      if (!(some_only && one_in(3))) {
        node.begin = Time{} + of_any_size(microseconds(100), milliseconds(150));
        node.deadline = *node.begin + std::chrono::seconds(30);
        if (hanging) node.deadline = *node.begin + milliseconds(400) + up_to(milliseconds(200));
        if (some_only) node.deadline = *node.begin + milliseconds(200) + up_to(milliseconds(400));
        if (short_limits && one_in(2)) node.deadline = *node.begin + up_to(milliseconds(300));
        at(*node.begin, [this, i] { begin(i); });
      }
      for (int k = below(8); k > 0; --k) {
        at(Time{} + of_any_size(microseconds(50), milliseconds(150)), [this, i] {
          const Node& sender = nodes_[i];
          if (running(i) && !(sender.begin && now_ >= *sender.begin))
            send_work(i, nullptr, 1 + below(12));
        });
      }
    }
    const auto any_time = [this] { return Time{} + up_to(milliseconds(one_in(4) ? 2000 : 200)); };
    if (profile == 3 || profile == 5 || profile == 7) {
      for (int k = 1 + below(2); k > 0; --k) at(any_time(), [this, i = any_node()] { die(i); });
    }
    if (profile == 4 || profile == 5 || profile == 7) {
      for (int k = 1 + below(3); k > 0; --k)
        at(any_time(), [this, a = any_node(), b = any_node()] { cut(a, b); });
    }
  }
  std::size_t any_node() {
    return static_cast<std::size_t>(below(static_cast<int>(nodes_.size())));
  }

  // ---- connections
  // When it arrives, if it does.
  void carry(std::size_t from, std::size_t to, bool large, std::function<void()> arrive) {
    Link& over = link(from, to);
    if (nodes_[to].dead || nodes_[to].ended) notice(from, to);
    Time& last = over.last[large ? 1 : 0];
    last = std::max(last, now_ + over.delay / 2 + up_to(over.delay / 2) +
                              (large ? up_to(kLongestDelay) : microseconds(0)));
    // What is sent into a connection that is over does not arrive.
    if (over.passes_until) return;
    at(last, [this, from, to, arrive = std::move(arrive)] {
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
          nodes_[at_node].protocol->on_peer_lost(id_of(peer));
          wake(at_node);
        });
      });
    });
  }
  void die(std::size_t at_node) {
    if (!running(at_node)) return;
    nodes_[at_node].dead = true;
    ++counts_.deaths;
    const bool silently = one_in(3);
    for (std::size_t i = 0; i < nodes_.size(); ++i) end_link(i, at_node, silently);
  }
  void cut(std::size_t a, std::size_t b) {
    if (a == b || !running(a) || !running(b)) return;
    ++counts_.cuts;
    end_link(a, b, false);
  }

  // ---- the application
  void send_work(std::size_t from, Handler* handler, int depth, std::uint64_t handler_id = 0) {
    const std::size_t to = any_node();
    Node& node = nodes_[from];
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
    ++counts_.messages;
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
      handler.steps = packet.work.depth > 0 ? below(3) : 0;
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
      send_work(at_node, &handler, handler.work.depth - 1 - below(3), id);
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
    nodes_[at_node].protocol->begin(nodes_[at_node].deadline);
    loop(at_node);
  }
  void loop(std::size_t at_node) {
    nodes_[at_node].waits = false;
    const std::uint64_t seen = nodes_[at_node].events;
    const std::uint64_t losses = nodes_[at_node].protocol->losses();
    next([this, at_node, seen, losses] {
      Protocol::View view{.losses = losses, .live = {}};
      for (std::size_t i = 0; i < nodes_.size(); ++i) {
        if (!nodes_[at_node].lost.contains(i)) view.live.insert(id_of(i));
      }
      next([this, at_node, seen, view = std::move(view)] {
        if (!running(at_node)) return;
        const auto effects = nodes_[at_node].protocol->on_time(now_, view);
        const bool sample = effects.sample;
        // A leader that is alone begins a round each time without asking.
        std::uint64_t& round = last_round_[at_node];
        const bool asks =
            !effects.sends.empty() && effects.sends[0].message.step == Step::poll &&
            std::exchange(round, effects.sends[0].message.round) < effects.sends[0].message.round;
        if (asks || (sample && view.live.size() == 1)) begins_round(at_node, effects);
        carry_out(at_node, effects);
        if (!sample) return wait(at_node, seen);
        read_status(at_node, [this, at_node, seen](const Protocol::Status& own) {
          if (own.lost != 0) nodes_[at_node].heard_of_loss = true;
          const auto answer = nodes_[at_node].protocol->on_sample(now_, own);
          if (answer.expect_closing) said_go(at_node, answer);
          carry_out(at_node, answer);
          wait(at_node, seen);
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
  void carry_out(std::size_t at_node, const Protocol::Effects& effects) {
    for (const auto& [to, said] : effects.sends) {
      if (said.step != Step::status) {
        send(at_node, index(to), said);
        continue;
      }
      read_status(at_node, [this, at_node, to = index(to), said = said](const auto& own) mutable {
        said.status = own;
        send(at_node, to, said);
      });
    }
    for (const WorkerId id : effects.reach) {
      if (nodes_[index(id)].dead || nodes_[index(id)].ended) notice(at_node, index(id));
    }
  }
  void send(std::size_t from, std::size_t to, const Protocol::Message& said) {
    if (nodes_[from].lost.contains(to) || (flaky_ && one_in(20))) return;
    carry(from, to, false, [this, from, to, said] { receive(from, to, said); });
  }
  void receive(std::size_t from, std::size_t to, const Protocol::Message& said) {
    Node& node = nodes_[to];
    if (said.step == Step::status && said.status.lost != 0) node.heard_of_loss = true;
    Protocol::Effects effects;
    try {
      effects = node.protocol->on_message(id_of(from), said);
    } catch (const Error& error) {
      return fail("w" + std::to_string(to) + " refused: " + error.what());
    }
    if (said.step == Step::go) node.go_received = true;
    carry_out(to, effects);
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
    node.polled.clear();
    for (std::size_t i = 0; i < nodes_.size(); ++i) end_link(i, at_node, one_in(4));
  }

  // ---- the rules
  // A round of this leader begins: what is on its way now crosses its beginning.
  void begins_round(std::size_t leader, const Protocol::Effects& effects) {
    Node& node = nodes_[leader];
    ++counts_.rounds;
    node.heard_of_loss = false;
    node.polled = {leader};
    for (const auto& [to, said] : effects.sends) node.polled.insert(index(to));
    const unsigned bit = 1U << leader;
    for (auto& [number, packet] : packets_) packet.work.excepted |= bit;
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      const bool outside = !node.polled.contains(i);
      for (auto& [id, each] : nodes_[i].handlers)
        each.work.excepted = outside ? each.work.excepted | bit : each.work.excepted & ~bit;
      for (auto& [id, each] : nodes_[i].calls) each.excepted &= ~bit;
    }
  }
  void said_go(std::size_t leader, const Protocol::Effects& effects) {
    Node& node = nodes_[leader];
    for (const auto& [to, said] : effects.sends) node.told.insert(index(to));
    auto group = node.told;
    group.insert(leader);
    const bool strict = !node.heard_of_loss;
    const auto check = [&](const char* what, unsigned excepted, std::size_t where) {
      const bool may_be = ((excepted >> leader) & 1U) != 0 && !strict;
      if (may_be) ++counts_.crossings;
      if (!may_be)
        fail("w" + std::to_string(leader) + " said GO while " + what + " w" +
             std::to_string(where));
    };
    for (const auto& [number, packet] : packets_) {
      if (group.contains(packet.from) && group.contains(packet.to) && running(packet.from) &&
          running(packet.to) && !link(packet.from, packet.to).passes_until)
        check("a message is on its way to", packet.work.excepted, packet.to);
    }
    for (const std::size_t i : group) {
      if (!running(i)) continue;
      for (const auto& [id, each] : nodes_[i].handlers)
        check("a handler runs on", each.work.excepted, i);
      for (const auto& [id, each] : nodes_[i].calls) check("a call is made by", each.excepted, i);
    }
  }
  void check_end_of(std::size_t at_node) {
    const Node& node = nodes_[at_node];
    const std::string name = "w" + std::to_string(at_node);
    if (now_ > node.deadline + kSlack) return fail(name + " ended after its limit");
    const auto& error = node.protocol->error();
    if (error) {
      ++counts_.timeouts;
      if (all_in_time_) return fail(name + " ended with an error: " + error->what());
      return check_error(at_node, error->what());
    }
    ++counts_.graceful;
    if (counts_.deaths + counts_.cuts + counts_.timeouts == 0) {
      if (!packets_.empty()) return fail(name + " ended while a message was on its way");
      for (const Node& each : nodes_) {
        if (each.served != 0 || !each.calls.empty())
          return fail(name + " ended while a message was being handled");
        if (!each.begin || *each.begin > now_)
          return fail(name + " ended before all had called shutdown");
      }
    }
    if (now_ >= node.deadline) return;
    for (const std::size_t to : node.told) {
      if (running(to) && !nodes_[to].go_received && !node.lost.contains(to))
        return fail(name + " closed before w" + std::to_string(to) + " knew that it may");
    }
  }
  void check_error(std::size_t at_node, const std::string& text) {
    const Node& node = nodes_[at_node];
    const std::string self = to_string(worker_named(id_of(at_node)));
    const std::string head = "shutdown of " + self + " was not graceful: ";
    if (text.find(head) != 0) return fail("an error with another beginning: " + text);
    const std::string why = text.substr(head.size());
    const auto says = [&](const char* what) { return why.find(what) == 0; };
    const bool not_called = says("no shutdown was called within the time limit on");
    const bool running_calls = says("calls are still running on");
    const bool no_go = says("no GO within the time limit from");
    if (says("messages are still in flight")) return;
    if (!not_called && !running_calls && !no_go && !says("no answer within the time limit from"))
      return fail("an unknown error: " + text);
    const auto ends = counts_.graceful + counts_.timeouts;  // this one included
    int named = 0;
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      const bool names = why.find(to_string(worker_named(id_of(i)))) != std::string::npos;
      const Node& other = nodes_[i];
      named += names ? 1 : 0;
      if (names && i == at_node && !running_calls) return fail("it names itself: " + text);
      const auto lost = node.lost_at.find(i);
      const bool known_lost = lost != node.lost_at.end();
      if (names && known_lost && lost->second + kKnownAfter < now_)
        return fail("it names a worker that was lost: " + text);
      const bool undisturbed = counts_.deaths + counts_.cuts == 0 && ends == 1 && !flaky_;
      if (not_called && i != at_node) {
        const bool late = !other.begin || *other.begin > now_;
        if (names && !late && undisturbed && *other.begin + kKnownAfter < node.deadline)
          return fail("it names a worker that had called shutdown: " + text);
        if (!names && late && !known_lost) return fail("it does not name all: " + text);
      }
      if (running_calls && !names && hanging_ == i && !known_lost && running(i) &&
          hanging_since_ + kKnownAfter < now_)
        return fail("it does not name the worker that hangs: " + text);
    }
    if (named == 0) return fail("it names no worker: " + text);
    if (no_go && named != 1) return fail("it names not just the leader: " + text);
  }
  [[nodiscard]] bool over() const {
    return std::all_of(nodes_.begin(), nodes_.end(),
                       [](const Node& node) { return node.dead || node.ended || !node.begin; });
  }
  void check_end() {
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (running(i) && nodes_[i].begin) return fail("w" + std::to_string(i) + " did not end");
    }
  }

  std::mt19937_64 random_;
  const Wrong wrong_;
  std::string failure_;
  Counts counts_;
  Time now_{};
  std::priority_queue<Event> events_;
  std::uint64_t event_number_ = 0;
  std::uint64_t last_id_ = 0;
  std::vector<Node> nodes_;
  std::array<Link, 25> links_;
  std::map<std::uint64_t, Packet> packets_;  // on their way
  std::array<std::uint64_t, 5> last_round_{};
  bool flaky_ = false;        // messages of the shutdown may fail to be sent
  bool all_in_time_ = false;  // all live ones call shutdown, and nothing hangs
  int hangs_left_ = 0;
  std::optional<std::size_t> hanging_;
  Time hanging_since_{};
};

ShutdownSimulation::ShutdownSimulation(std::uint64_t seed, Wrong wrong)
    : world_(std::make_unique<World>(seed, wrong)) {}
ShutdownSimulation::~ShutdownSimulation() = default;
std::string ShutdownSimulation::run() { return world_->run(); }
ShutdownSimulation::Counts ShutdownSimulation::counts() const { return world_->counts(); }

}  // namespace stitch::rpc::test
