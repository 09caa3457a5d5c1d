// One file, though long: what the workers of a history do.
#include "tests/rpc/shutdown_simulation.h"

#include <algorithm>
#include <cmath>

#include "tests/rpc/shutdown_simulation_parts.h"

namespace stitch::rpc::test {

namespace {
constexpr milliseconds kLongStep{200};
constexpr milliseconds kStillReading{1};  // when a loss is noticed
constexpr milliseconds kReadingSlowly{8};
}  // namespace

using World = ShutdownSimulation::World;

World::World(std::uint64_t seed, Wrong wrong) : random_(seed), wrong_(wrong) { set_up(); }

std::string World::run() {
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

microseconds World::of_any_size(microseconds shortest, Duration longest) {
  const double ratio = std::chrono::duration<double>(longest) / shortest;
  return microseconds(static_cast<std::int64_t>(static_cast<double>(shortest.count()) *
                                                std::pow(ratio, below(1000) / 999.0)));
}

void World::fail(const std::string& what) {
  if (failure_.empty())
    failure_ = what + " at " + std::to_string((now_ - Time{}) / microseconds(1)) + " us";
}

std::string World::name_of(std::size_t node) const {
  const Node& named = nodes_[node];
  const std::string epoch = named.epoch == 1 ? "" : " epoch " + std::to_string(named.epoch);
  return "w" + std::to_string(named.slot) + epoch;
}

std::size_t World::present(std::size_t slot) const {
  std::size_t last = slot;
  for (std::size_t i = slots_; i < nodes_.size(); ++i) {
    if (nodes_[i].slot == slot) last = i;
  }
  return last;
}

// ---- the beginning

void World::set_up() {
  nodes_.reserve(kMaxNodes);
  slots_ = static_cast<std::size_t>(2 + below(4));
  const auto profile = below(8);
  short_limits_ = profile == 2 || profile == 7;
  hanging_limits_ = profile == 6 || (profile == 7 && one_in(2));
  some_only_ = profile == 2 || (profile == 7 && one_in(3));
  flaky_ = profile == 5 || profile == 7;
  all_in_time_ = !short_limits_ && !hanging_limits_ && !some_only_;
  hangs_left_ = hanging_limits_ ? 1 : 0;
  for (Link& each : links_)
    each.delay = of_any_size(microseconds(10), one_in(16) ? kSlowDelay : kLongestDelay);
  const bool deaths = profile == 3 || profile == 5 || profile == 7;
  const bool returns = deaths && one_in(2);
  for (std::size_t i = 0; i < slots_; ++i) {
    add_node(i);
    if (!(some_only_ && one_in(3))) {
      // Where others come back, the shutdown has to last.
      const bool late = returns && i + 1 == slots_ && one_in(2);
      will_begin(i, Time{} + of_any_size(microseconds(100), milliseconds(late ? 800 : 150)));
    }
    will_work(i, Time{});
  }
  const auto any_time = [this] { return Time{} + up_to(milliseconds(one_in(4) ? 2000 : 200)); };
  if (deaths) {
    for (int k = 1 + below(2); k > 0; --k) {
      const std::size_t slot = returns && one_in(2) ? 0 : any_slot();
      const bool comes_back = returns && !one_in(4);
      at(any_time(), [this, slot, comes_back] { die(present(slot), comes_back); });
    }
  }
  if (profile == 4 || profile == 5 || profile == 7) {
    for (int k = 1 + below(3); k > 0; --k)
      at(any_time(), [this, a = any_slot(), b = any_slot()] { cut(present(a), present(b)); });
  }
}

std::size_t World::add_node(std::size_t slot) {
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
void World::will_begin(std::size_t node, Time when) {
  Node& one = nodes_[node];
  one.begin = when;
  one.deadline = when + std::chrono::seconds(30);
  if (hanging_limits_) one.deadline = when + milliseconds(400) + up_to(milliseconds(200));
  if (some_only_) one.deadline = when + milliseconds(200) + up_to(milliseconds(400));
  if (short_limits_ && one_in(2)) one.deadline = when + up_to(milliseconds(300));
  at(when, [this, node] { begin(node); });
}

void World::will_work(std::size_t node, Time from) {
  for (int k = below(8); k > 0; --k) {
    at(from + of_any_size(microseconds(50), milliseconds(150)), [this, node] {
      const Node& sender = nodes_[node];
      if (running(node) && !(sender.begin && now_ >= *sender.begin))
        send_work(node, nullptr, 1 + below(12));
    });
  }
}

// ---- connections

// When it arrives, if it does.
void World::carry(std::size_t from, std::size_t to, bool large, std::function<void()> arrive) {
  Link& over = link(from, to);
  if (!running(to)) notice(from, to);
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
void World::end_link(std::size_t from, std::size_t to, bool silently) {
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

void World::notice(std::size_t at_node, std::size_t peer) {
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

void World::die(std::size_t at_node, bool returns) {
  if (!running(at_node)) return;
  nodes_[at_node].dead = true;
  ++counts_.deaths;
  const bool silently = one_in(3);
  for (std::size_t i = 0; i < nodes_.size(); ++i) end_link(i, at_node, silently);
  if (returns) {
    after(of_any_size(microseconds(500), milliseconds(500)),
          [this, slot = nodes_[at_node].slot] { come_back(slot); });
  }
}

void World::cut(std::size_t a, std::size_t b) {
  if (a == b || !running(a) || !running(b)) return;
  ++counts_.cuts;
  end_link(a, b, false);
}

// ---- lives

// As a new life, if there is a world to come back to.
void World::come_back(std::size_t slot) {
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
void World::start_when_known(std::size_t joiner) {
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
  ++counts_.returns;
  if (lowest) ++counts_.lowest_returns;
  if (!(some_only_ && one_in(3)))
    will_begin(joiner, now_ + of_any_size(microseconds(100), milliseconds(300)));
  will_work(joiner, now_);
}

// It is a member once its former life is lost.
void World::learn(std::size_t at_node, std::size_t joiner) {
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

void World::send_work(std::size_t from, Handler* handler, int depth, std::uint64_t handler_id) {
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

void World::transmit(std::size_t from, std::size_t to, Work work) {
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

void World::arrive(std::uint64_t number) {
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

void World::handle_on(std::size_t at_node, std::uint64_t id) {
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
      transmit(at_node, ended.caller, {Work::Kind::reply, 0, ended.work.call, ended.work.excepted});
    --node.served;
  } else if (handler.steps > 0) {
    after(of_any_size(microseconds(10), one_in(8) ? kLongStep : milliseconds(3)),
          [this, at_node, id] { handle_on(at_node, id); });
  }
}

void World::answered(std::size_t at_node, std::uint64_t id) {
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

void World::begin(std::size_t at_node) {
  if (!running(at_node)) return;
  nodes_[at_node].protocol->begin(nodes_[at_node].deadline);
  loop(at_node);
}

void World::loop(std::size_t at_node) {
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

void World::wait(std::size_t at_node, std::uint64_t seen) {
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

void World::wake(std::size_t at_node) {
  Node& node = nodes_[at_node];
  ++node.events;
  if (!std::exchange(node.waits, false)) return;
  after(up_to(microseconds(50)), [this, at_node] {
    if (running(at_node)) loop(at_node);
  });
}

void World::read_status(std::size_t at_node, std::function<void(const Protocol::Status&)> then) {
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

void World::carry_out(std::size_t at_node, const Protocol::Effects& effects, const Lives& lives) {
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

void World::send(std::size_t from, std::size_t to, const Protocol::Message& said) {
  if (nodes_[from].lost.contains(to) || (flaky_ && one_in(20))) return;
  carry(from, to, false, [this, from, to, said] {
    // A reader may be at the last messages of a life for long, while the next one joins.
    if (!nodes_[from].dead || one_in(2)) return receive(from, to, said);
    after(up_to(kReadingSlowly), [this, from, to, said] {
      if (running(to)) receive(from, to, said);
    });
  });
}

void World::receive(std::size_t from, std::size_t to, const Protocol::Message& said) {
  Node& node = nodes_[to];
  if (said.step == Step::status && said.status.lost != 0) node.heard_of_loss = true;
  Protocol::Effects effects;
  try {
    effects = node.protocol->on_message(info_of(from), said);
  } catch (const Error& error) {
    return fail(name_of(to) + " refused: " + error.what());
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

void World::end(std::size_t at_node) {
  Node& node = nodes_[at_node];
  check_end_of(at_node);
  node.ended = true;
  node.polled.clear();
  for (std::size_t i = 0; i < nodes_.size(); ++i) end_link(i, at_node, one_in(4));
}

ShutdownSimulation::ShutdownSimulation(std::uint64_t seed, Wrong wrong)
    : world_(std::make_unique<World>(seed, wrong)) {}
ShutdownSimulation::~ShutdownSimulation() = default;
std::string ShutdownSimulation::run() { return world_->run(); }
ShutdownSimulation::Counts ShutdownSimulation::counts() const { return world_->counts(); }

}  // namespace stitch::rpc::test
