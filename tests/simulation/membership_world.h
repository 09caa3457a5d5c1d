// One file, though long: the workers of a history and the network between them.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "stitch/rpc/membership/membership_protocol.h"
#include "stitch/rpc/message/life_text.h"
#include "tests/simulation/membership_simulation.h"

namespace stitch::rpc::membership_simulation {

using simulation::Time;
using Ms = std::chrono::milliseconds;
using Effects = MembershipProtocol::Effects;

inline constexpr Ms kConnectTimeout{1000};
inline constexpr Ms kHeartbeatTimeout{1500};

struct Frame {
  enum class Kind { work, heartbeat, notice } kind = Kind::work;
  Notice notice{};
  Digests digests{};
};

// One life of a worker.
struct Node {
  std::size_t index;
  MembershipProtocol protocol;
  bool member;
  bool running = true;
  bool stopped = false;
  bool frozen = false;  // stopped, and never to go on
  bool doomed = false;  // will be killed or frozen early
  bool leaving = false, refused = false;
  std::uint64_t tickets = 0;
  int ticks = 0;
  std::set<std::pair<std::uint32_t, std::uint64_t>> joined{};  // lives, as this one was told
  std::set<std::pair<std::uint32_t, std::uint64_t>> over{};
  std::vector<std::function<void()>> postponed{};  // until it runs again

  [[nodiscard]] const WorkerInfo& info() const { return protocol.self(); }
  [[nodiscard]] bool takes_part() const { return running && member && !protocol.fenced(); }
};

// Between two lives.
struct Link {
  enum class State { none, bound, ended } state = State::none;
  Time tried_since{};   // while there is none yet
  bool wanted = false;  // something waits for it
  struct End {
    simulation::Channel<Frame> incoming{};
    Time heard{};
    bool lost = false;    // it knows
    bool trying = false;  // it waits for the connection to be made
  };
  std::map<std::size_t, End> ends{};  // by the node there
};

class World : public simulation::History {
 protected:
  World(std::uint64_t number, const Options& options) : History(number), options_(options) {}

  // ---- the rules, and what may follow
  virtual void check_verdict(const Node& at, const MembershipProtocol::Event& event,
                             const Node& subject) = 0;
  virtual void check_welcome(const Node& sponsor, const WorkerInfo& joiner) = 0;
  virtual void fail_early(Node& victim) = 0;
  [[nodiscard]] virtual bool decides(const Node& node) = 0;

  [[nodiscard]] Ms delay() { return Ms(pick(20) == 0 ? pick(200) : pick(10)); }
  [[nodiscard]] static bool alive_at(const Node& node, const WorkerInfo& info) {
    return node.protocol.state(info) == LifeState::alive;
  }

  // ---- the workers
  Node& add_node(std::uint32_t id, std::uint64_t epoch, bool member) {
    MemberCard card{{"w" + std::to_string(id), WorkerId(id), epoch}, {}, {}};
    nodes_.push_back(std::make_unique<Node>(Node{
        nodes_.size(),
        MembershipProtocol(std::move(card), {.heartbeat_timeout = kHeartbeatTimeout}), member}));
    return *nodes_.back();
  }
  Node* node_of(const WorkerInfo& info) {
    for (const auto& node : nodes_) {
      if (node->info() == info) return node.get();
    }
    return nullptr;
  }
  Node* random_running() {
    std::vector<Node*> running;
    for (const auto& node : nodes_) {
      if (node->takes_part() && !node->stopped && !node->leaving) running.push_back(node.get());
    }
    return running.size() < 2 ? nullptr : running[pick(running.size())];
  }
  bool reaches(const Node& a, const Node& b) const {
    return apart_.contains(a.index) == apart_.contains(b.index) &&
           !blocked_.contains(std::minmax(a.index, b.index));
  }
  Link& link(const Node& a, const Node& b) {
    auto& found = links_[std::minmax(a.index, b.index)];
    if (!found) {
      found = std::make_unique<Link>();
      found->ends[a.index];
      found->ends[b.index];
    }
    return *found;
  }

  // ---- the network

  void send(Node& from, Node& to, Frame frame) {
    Link& between = link(from, to);
    if (between.ends[from.index].lost) return;
    if (between.state == Link::State::ended) {
      at(now_ + kConnectTimeout, [this, &from, &to] { lose(from, to, "refused", true); });
      return;
    }
    Link::End& there = between.ends[to.index];
    there.incoming.push_back(std::move(frame));
    if (between.state == Link::State::none) {
      between.wanted = true;
      connect(from, to);
    }
    if (between.state != Link::State::bound) return;
    at(there.incoming.in_order(now_ + delay()), [this, &from, &to] { deliver(from, to); });
  }
  void connect(Node& from, Node& to) {
    Link& between = link(from, to);
    const auto failing = failing_.find(std::minmax(from.index, to.index));
    if (!to.running) return give_up(from, to, "connection refused", kConnectTimeout);
    if (!reaches(from, to)) return give_up(from, to, "no answer", kConnectTimeout);
    if (failing != failing_.end() && now_ < failing->second)
      return give_up(from, to, "no route", kConnectTimeout);
    if (between.tried_since == Time{}) between.tried_since = now_;
    const auto slow = slow_.find(std::minmax(from.index, to.index));
    if (from.stopped || to.stopped || (!to.protocol.fenced() && !to.protocol.state(from.info())) ||
        (slow != slow_.end() && now_ - between.tried_since < slow->second)) {
      // It waits: for a process, or until the other side knows this one.
      between.ends[from.index].trying = true;
      at(now_ + Ms(50), [this, &from, &to] {
        Link& waiting = link(from, to);
        waiting.ends[from.index].trying = false;
        if (waiting.state == Link::State::none && from.running && !waiting.ends.at(from.index).lost)
          connect(from, to);
      });
      return;
    }
    if (const auto obituary = to.protocol.obituary(from.info())) {
      at(now_ + delay(), [this, &from, &to, notice = *obituary] {
        if (from.running) carry_out(from, from.protocol.on_notice(to.info(), notice, now_));
      });
      return give_up(from, to, "refused", Ms(250));
    }
    between.state = Link::State::bound;
    for (auto& [index, end] : between.ends) {
      end.heard = now_;
      Node& receiver = *nodes_[index];
      Node& sender = index == from.index ? to : from;
      for (std::size_t i = 0; i < end.incoming.size(); ++i) {
        at(end.incoming.in_order(now_ + delay()),
           [this, &sender, &receiver] { deliver(sender, receiver); });
      }
    }
  }
  // An attempt for which nothing waits is made again when it is asked for; others lose the peer.
  void give_up(Node& from, Node& to, const std::string& why, Ms after) {
    at(now_ + after, [this, &from, &to, why, was_wanted = link(from, to).wanted] {
      const Link& between = link(from, to);
      if (was_wanted) {
        lose(from, to, why, true);
      } else if (between.wanted && between.state == Link::State::none && from.running &&
                 !between.ends.at(from.index).lost) {
        connect(from, to);
      }
    });
  }
  void deliver(Node& from, Node& to) {
    Link& between = link(from, to);
    Link::End& end = between.ends[to.index];
    if (between.state == Link::State::ended || end.incoming.empty() || !to.running) return;
    if (to.stopped) {
      to.postponed.push_back([this, &from, &to] { deliver(from, to); });
      return;
    }
    if (!reaches(from, to)) {  // sent again until it gets there, or the connection ends
      at(now_ + Ms(100), [this, &from, &to] { deliver(from, to); });
      return;
    }
    const Frame frame = end.incoming.take(0);
    end.heard = now_;
    handle(from, to, frame);
  }
  void handle(Node& from, Node& to, const Frame& frame) {
    const auto state = to.protocol.state(from.info());
    if (to.member && !state && frame.kind == Frame::Kind::work && !to.protocol.fenced())
      return fail(to.info(), " is called by ", from.info(), ", which it does not know");
    note(to.info(), " reads from ", from.info());
    Effects effects;
    if (frame.kind == Frame::Kind::heartbeat)
      effects = to.protocol.on_heartbeat(from.info(), frame.digests, now_);
    if (frame.kind == Frame::Kind::notice)
      effects = to.protocol.on_notice(from.info(), frame.notice, now_);
    if (state && *state != LifeState::alive && !effects.empty())
      return fail(to.info(), " obeys ", from.info(), ", which is over");
    carry_out(to, std::move(effects));
  }
  // The connection to `other` is over for `at`. What has arrived there may still be handled.
  void lose(Node& here, Node& other, const std::string& why, bool tell) {
    Link& between = link(here, other);
    Link::End& end = between.ends[here.index];
    if (end.lost) return;
    end.lost = true;
    if (options_.short_stops > 0 && here.running && other.running && !here.protocol.fenced() &&
        !other.protocol.fenced() && !here.leaving && !other.leaving) {
      fail(here.info(), " has lost ", other.info(), " without need: ", why);
    }
    end_link(here, other, why);
    if (tell && here.running)
      carry_out(here, here.protocol.on_link_lost(other.info(), Error(ErrorCode::disconnected, why),
                                                 now_));
  }
  void end_link(Node& a, Node& b, const std::string& why) {
    Link& between = link(a, b);
    if (between.state == Link::State::ended) return;
    note(a.info(), " and ", b.info(), " lose each other: ", why);
    // Before that, what was to be sent is still on the side that has asked for the connection.
    const bool was_bound = between.state == Link::State::bound;
    between.state = Link::State::ended;
    for (auto& [index, end] : between.ends) {
      Node& here = *nodes_[index];
      Node& other = index == a.index ? b : a;
      const auto read = std::exchange(end.incoming, {});
      if (was_bound && !read.empty() && here.running && !here.stopped && pick(2) == 0) {
        at(now_, [this, &here, &other, frame = read.front()] {
          if (here.running && !here.stopped) handle(other, here, frame);
        });
      }
      const auto notice = [this, &here, &other, why] {
        const auto tell = [this, &here, &other, why] {
          Link::End& own = link(here, other).ends[here.index];
          if (std::exchange(own.lost, true) || !here.running) return;
          carry_out(here, here.protocol.on_link_lost(other.info(),
                                                     Error(ErrorCode::disconnected, why), now_));
        };
        if (here.stopped) {
          here.postponed.push_back(tell);
        } else {
          tell();
        }
      };
      // Over a network that delivers nothing, only silence tells.
      if (reaches(here, other)) {
        at(now_ + delay(), notice);
      } else {
        at(now_ + Ms(1500 + pick(500)), notice);
      }
    }
  }

  // ---- what the workers do

  void schedule_tick(Node& node) {
    at(now_ + Ms(245 + pick(10)), [this, &node] { tick(node); });
  }
  // The timer of a worker that is stopped runs as soon as it goes on.
  void tick(Node& node) {
    if (!node.running) return;
    if (node.stopped) return node.postponed.push_back([this, &node] { tick(node); });
    if (++node.ticks % MembershipProtocol::kTicks == 0) beat(node);
    carry_out(node, node.protocol.on_tick(now_, links_of(node)));
    schedule_tick(node);
  }
  void beat(Node& node) {
    for (const auto& other : nodes_) {
      if (other.get() == &node) continue;
      const Link& between = link(node, *other);
      if (between.state == Link::State::bound && !between.ends.at(node.index).lost)
        send(node, *other, {Frame::Kind::heartbeat, {}, node.protocol.digests()});
    }
  }
  std::vector<MembershipProtocol::Link> links_of(Node& node) {
    std::vector<MembershipProtocol::Link> links;
    for (const auto& other : nodes_) {
      if (other.get() == &node || !alive_at(node, other->info())) continue;
      Link& between = link(node, *other);
      Link::End& end = between.ends[node.index];
      if (end.lost || between.state == Link::State::ended) continue;
      const bool bound = between.state == Link::State::bound;
      const WorkerInfo& info = other->info();
      links.push_back({info.id, info.epoch, end.heard, bound});
    }
    return links;
  }
  void schedule_work(Node& node) {
    if (options_.quiet > 0) return;
    at(now_ + Ms(200 + pick(2000)), [this, &node] {
      if (!node.running || node.protocol.fenced() || node.leaving) return;
      if (!node.stopped && node.member) {
        for (const KnownLife& life : node.protocol.lives()) {
          if (life.state != LifeState::alive || life.card.info == node.info()) continue;
          if (!calm_ && options_.pauses + options_.isolations == 0 && pick(3) != 0) continue;
          if (Node* to = node_of(life.card.info)) send(node, *to, {});
        }
      }
      schedule_work(node);
    });
  }
  void carry_out(Node& node, Effects effects) {
    const auto key = [](const WorkerInfo& info) { return std::pair(info.id.value(), info.epoch); };
    if (!node.running) return;
    for (const auto& event : effects.events) {
      if (event.kind != MembershipProtocol::Event::Kind::dead) continue;
      if (Node* subject = node_of(event.card.info)) check_verdict(node, event, *subject);
    }
    for (const auto& [info, reason] : effects.lose) {
      if (Node* other = node_of(info)) lose(node, *other, reason.what(), false);
    }
    for (const auto& event : effects.events) {
      using Kind = MembershipProtocol::Event::Kind;
      const WorkerInfo& about = event.card.info;
      const std::string who = to_string(node.info()) + " hears of " + life_text(about);
      note(who, ", event ", static_cast<int>(event.kind));
      Node* subject = node_of(about);
      switch (event.kind) {
        case Kind::joined:
          if (!node.joined.insert(key(about)).second) fail(who, " joining twice");
          // What became of a connection before says nothing.
          if (subject != nullptr) link(node, *subject).ends[node.index].lost = false;
          for (const auto& each : node.joined) {
            if (each.first == about.id.value() && each.second < about.epoch &&
                !node.over.contains(each))
              fail(who, " joining before its former life is over");
          }
          break;
        case Kind::dead:
          count("verdicts");
          if (!node.over.insert(key(about)).second) fail(who, " being over twice");
          break;
        case Kind::left:
          count("left");
          if (!node.over.insert(key(about)).second) fail(who, " being over twice");
          break;
        case Kind::fenced:
          count("fenced");
          if (!declared_.contains(key(node.info())))
            fail(node.info(), " is fenced, but was not declared dead");
          break;
      }
    }
    for (auto& [to, notice] : effects.send) {
      if (Node* other = node_of(to)) send(node, *other, {Frame::Kind::notice, std::move(notice)});
    }
    for (const WorkerInfo& to : effects.reach) {
      Node* other = node_of(to);
      if (other == nullptr) continue;
      const Link::End& end = link(node, *other).ends[node.index];
      if (end.lost || end.trying) continue;
      if (link(node, *other).state == Link::State::none) connect(node, *other);
    }
    for (const auto& each : effects.probes) {
      if (Node* other = node_of(each.about))
        probe(node, *other, std::chrono::duration_cast<Ms>(each.limit));
    }
    for (const auto& answer : effects.answers) {
      Node* joiner = node_of(answer.joiner);
      if (joiner != nullptr && !answer.elsewhere) tell(node, *joiner, answer.refusal.has_value());
    }
    if (effects.leave_done && node.leaving) end_process(node);
  }
  // By way of the store.
  void tell(Node& sponsor, Node& to, bool refused) {
    if (!reaches(sponsor, to)) return;
    if (!refused) check_welcome(sponsor, to.info());
    at(now_ + delay(), [this, &to, refused, by = sponsor.info(), lives = sponsor.protocol.lives()] {
      if (!to.running || to.stopped || to.member || to.refused) return;
      if (refused) {
        count("refused");
        to.refused = true;
        end_process(to);
        return;
      }
      count("welcomed");
      to.member = true;
      carry_out(to, to.protocol.on_lives(lives, by, now_));
      schedule_tick(to);
      schedule_work(to);
      if (early_joins_ > 0 && pick(2) == 0) {
        --early_joins_;
        fail_early(to);
      }
    });
  }
  void report(Node& node, Node& about, Ms after, std::optional<bool> answered, Time deadline) {
    at(now_ + after, [this, &node, &about, answered, deadline] {
      const auto tell = [this, &node, &about, answered, deadline] {
        // Its timer and its readers race.
        const bool timer_first = now_ > deadline && pick(2) == 0;
        const auto known = timer_first && answered ? std::optional(false) : answered;
        as_judge_ = decides(node);  // whatever was so when it began
        const Link& between = link(node, about);
        const bool connected =
            between.state == Link::State::bound && !between.ends.at(node.index).lost;
        carry_out(node, node.protocol.on_probe(about.info(), known, now_, connected));
        as_judge_ = false;
      };
      if (node.stopped) {
        node.postponed.push_back(tell);
      } else if (node.running) {
        tell();
      }
    });
  }
  void probe(Node& node, Node& about, Ms limit) {
    const Time deadline = now_ + limit;
    // It may close the connection before it has read that.
    if (const auto verdict = node.protocol.obituary(about.info());
        verdict && pick(2) == 0 && about.running && !about.stopped && reaches(node, about)) {
      at(now_ + delay(), [this, &node, &about, notice = *verdict] {
        if (about.running && !about.stopped)
          carry_out(about, about.protocol.on_notice(node.info(), notice, now_));
      });
    }
    if (options_.pauses == 0 && pick(20) == 0)
      return report(node, about, delay(), std::nullopt, deadline);
    const auto strain = strained_.find({node.index, about.index});
    if (strain == strained_.end()) return wait_for_answer(node, about, limit, deadline);
    if (strain->second >= limit) return report(node, about, limit, false, deadline);
    at(now_ + strain->second, [this, &node, &about, deadline, left = limit - strain->second] {
      if (node.running) wait_for_answer(node, about, left, deadline);
    });
  }
  void wait_for_answer(Node& node, Node& about, Ms left, Time deadline) {
    if (!about.running && reaches(node, about))
      return report(node, about, delay(), false, deadline);
    if (about.stopped || !about.running || !reaches(node, about)) {
      // It is answered if that changes before its end.
      if (left <= Ms(0)) return report(node, about, Ms(0), false, deadline);
      at(now_ + Ms(100), [this, &node, &about, left, deadline] {
        if (node.running) wait_for_answer(node, about, left - Ms(100), deadline);
      });
      return;
    }
    if (const auto obituary = about.protocol.obituary(node.info())) {
      at(now_, [this, &node, &about, notice = *obituary] {
        if (node.running && !node.stopped)
          carry_out(node, node.protocol.on_notice(about.info(), notice, now_));
      });
    }
    report(node, about, delay(), true, deadline);
  }
  void end_process(Node& node) {
    node.running = false;
    note(node.info(), " ends");
    for (const auto& other : nodes_) {
      if (other.get() != &node && links_.contains(std::minmax(node.index, other->index)))
        end_link(node, *other, "the peer closed the connection");
    }
  }
  // Asks the members in the order of their ids until one answers.
  void ask_to_join(Node& joiner, std::size_t first) {
    if (joiner.member || joiner.refused || !joiner.running) return;
    std::vector<Node*> members;
    for (const auto& node : nodes_) {
      if (node->member && node.get() != &joiner && node->info().id != joiner.info().id)
        members.push_back(node.get());
    }
    std::sort(members.begin(), members.end(),
              [](const Node* a, const Node* b) { return a->info().id < b->info().id; });
    if (members.empty()) return;
    Node& asked = *members[first % members.size()];
    const bool there = asked.running && !asked.stopped && reaches(joiner, asked);
    if (there) {
      at(now_ + delay(), [this, &joiner, &asked] {
        if (!asked.running || asked.stopped || !joiner.running || joiner.member) return;
        const std::uint64_t ticket = (joiner.index << 16) + ++joiner.tickets;
        // Its former sponsor has ended before it answered.
        if (alive_at(asked, joiner.info()) && node_of(joiner.info()) == &joiner)
          return tell(asked, joiner, false);
        carry_out(asked, asked.protocol.admit(ticket, {joiner.info(), {}, {}}, now_));
      });
    }
    at(now_ + Ms(there ? 6000 : 200), [this, &joiner, first] { ask_to_join(joiner, first + 1); });
  }
  const Options options_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::map<std::pair<std::size_t, std::size_t>, std::unique_ptr<Link>> links_;
  std::set<std::pair<std::size_t, std::size_t>> blocked_;
  std::map<std::pair<std::size_t, std::size_t>, Ms> slow_;  // how long a first connection takes
  std::map<std::pair<std::size_t, std::size_t>, Time> failing_;  // until when one fails
  // How long a probe of the second by the first takes.
  std::map<std::pair<std::size_t, std::size_t>, Ms> strained_;
  std::set<std::size_t> apart_;  // one side of a partition
  std::set<std::pair<std::uint32_t, std::uint64_t>> declared_;
  bool as_judge_ = false;  // the worker that is told of a probe decides
  // The lives whose judge had no connection to them any more when it declared them dead.
  std::set<std::pair<std::uint32_t, std::uint64_t>> out_of_touch_;
  std::set<std::pair<std::uint32_t, std::uint64_t>> at_fault_;  // were paused or isolated
  std::uint32_t next_id_ = 0;
  int early_joins_ = 0;  // of the next workers to join, so many fail early
  bool calm_ = false;    // no faults any more
};

}  // namespace stitch::rpc::membership_simulation
