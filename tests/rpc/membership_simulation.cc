#include "tests/rpc/membership_simulation.h"

#include <algorithm>
#include <tuple>

#include "tests/rpc/membership_simulation_parts.h"

namespace stitch::rpc::testing {

namespace {
constexpr std::chrono::milliseconds kRest{40'000};  // and then all comes to rest
constexpr std::chrono::milliseconds kConnectTimeout{1000};
}  // namespace

MembershipSimulation::MembershipSimulation(std::uint64_t seed, Options options)
    : options_(options), random_(seed) {}

MembershipSimulation::~MembershipSimulation() = default;

void MembershipSimulation::fail(const std::string& what) {
  if (failure_.empty()) failure_ = std::to_string(now_.time_since_epoch() / Ms(1)) + " ms: " + what;
}

void MembershipSimulation::at(Time when, std::function<void()> event) {
  events_.push({when, order_++, std::move(event)});
}

void MembershipSimulation::advance_to(Time end) {
  while (failure_.empty() && !events_.empty() && events_.top().when <= end) {
    now_ = events_.top().when;
    const auto run = events_.top().run;
    events_.pop();
    run();
  }
  now_ = end;
}

MembershipSimulation::Node& MembershipSimulation::add_node(std::uint32_t id, std::uint64_t epoch,
                                                           bool member) {
  MemberCard card{{"w" + std::to_string(id), WorkerId(id), epoch}, {}, {}};
  nodes_.push_back(
      std::make_unique<Node>(Node{nodes_.size(), MembershipProtocol(std::move(card), {}), member}));
  return *nodes_.back();
}

MembershipSimulation::Node* MembershipSimulation::node_of(const WorkerInfo& info) {
  for (const auto& node : nodes_) {
    if (node->info() == info) return node.get();
  }
  return nullptr;
}

MembershipSimulation::Node* MembershipSimulation::random_running() {
  std::vector<Node*> running;
  for (const auto& node : nodes_) {
    if (node->takes_part() && !node->stopped && !node->leaving) running.push_back(node.get());
  }
  return running.size() < 2 ? nullptr : running[static_cast<std::size_t>(pick(running.size()))];
}

bool MembershipSimulation::reaches(const Node& a, const Node& b) const {
  return apart_.contains(a.index) == apart_.contains(b.index) &&
         !blocked_.contains(std::minmax(a.index, b.index));
}

MembershipSimulation::Link& MembershipSimulation::link(const Node& a, const Node& b) {
  auto& found = links_[std::minmax(a.index, b.index)];
  if (!found) {
    found = std::make_unique<Link>();
    found->ends[a.index];
    found->ends[b.index];
  }
  return *found;
}

// ---- the network

void MembershipSimulation::send(Node& from, Node& to, Frame frame) {
  Link& between = link(from, to);
  if (between.ends[from.index].lost) return;
  if (between.state == Link::State::ended) {
    at(now_ + kConnectTimeout, [this, &from, &to] { lose(from, to, "refused", true); });
    return;
  }
  between.ends[from.index].sent = true;
  Link::End& there = between.ends[to.index];
  there.incoming.push_back(std::move(frame));
  if (between.state == Link::State::none) {
    between.wanted = true;
    connect(from, to);
  }
  if (between.state != Link::State::bound) return;
  const Time when = std::max(there.last_delivery, now_ + delay());
  there.last_delivery = when;
  at(when, [this, &from, &to] { deliver(from, to); });
}

void MembershipSimulation::connect(Node& from, Node& to) {
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
      if (from.running) perform(from, from.protocol.on_notice(to.info(), notice, now_));
    });
    return give_up(from, to, "refused", Ms(250));
  }
  between.state = Link::State::bound;
  for (auto& [index, end] : between.ends) {
    end.heard = now_;
    Node& receiver = *nodes_[index];
    Node& sender = index == from.index ? to : from;
    for (std::size_t i = 0; i < end.incoming.size(); ++i) {
      end.last_delivery = std::max(end.last_delivery, now_ + delay());
      at(end.last_delivery, [this, &sender, &receiver] { deliver(sender, receiver); });
    }
  }
}

// An attempt for which nothing waits is made again when it is asked for; others lose the peer.
void MembershipSimulation::give_up(Node& from, Node& to, const std::string& why, Ms after) {
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

void MembershipSimulation::deliver(Node& from, Node& to) {
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
  const Frame frame = std::move(end.incoming.front());
  end.incoming.pop_front();
  end.heard = now_;
  handle(from, to, frame);
}

void MembershipSimulation::handle(Node& from, Node& to, const Frame& frame) {
  const auto state = to.protocol.state(from.info());
  if (to.member && !state && frame.kind == Frame::Kind::work && !to.protocol.fenced())
    return fail(to_string(to.info()) + " is called by " + to_string(from.info()) +
                ", which it does not know");
  Effects effects;
  if (frame.kind == Frame::Kind::heartbeat)
    effects = to.protocol.on_heartbeat(from.info(), frame.digest, now_);
  if (frame.kind == Frame::Kind::notice)
    effects = to.protocol.on_notice(from.info(), frame.notice, now_);
  if (state && *state != LifeState::alive && !effects.empty())
    return fail(to_string(to.info()) + " obeys " + to_string(from.info()) + ", which is over");
  perform(to, std::move(effects));
}

// The connection to `other` is over for `at`. What has arrived there may still be handled.
void MembershipSimulation::lose(Node& here, Node& other, const std::string& why, bool tell) {
  Link& between = link(here, other);
  Link::End& end = between.ends[here.index];
  if (end.lost) return;
  end.lost = true;
  if (options_.short_stops > 0 && here.running && other.running && !here.protocol.fenced() &&
      !other.protocol.fenced() && !here.leaving && !other.leaving) {
    fail(to_string(here.info()) + " has lost " + to_string(other.info()) + " without need: " + why);
  }
  end_link(here, other, why);
  if (tell && here.running)
    perform(here,
            here.protocol.on_link_lost(other.info(), Error(ErrorCode::disconnected, why), now_));
}

void MembershipSimulation::end_link(Node& a, Node& b, const std::string& why) {
  Link& between = link(a, b);
  if (between.state == Link::State::ended) return;
  // Before that, what was to be sent is still on the side that has asked for the connection.
  const bool was_bound = between.state == Link::State::bound;
  between.state = Link::State::ended;
  for (auto& [index, end] : between.ends) {
    Node& here = *nodes_[index];
    Node& other = index == a.index ? b : a;
    const std::deque<Frame> read = std::move(end.incoming);
    if (was_bound && !read.empty() && here.running && !here.stopped && pick(2) == 0) {
      at(now_, [this, &here, &other, frame = read.front()] {
        if (here.running && !here.stopped) handle(other, here, frame);
      });
    }
    const auto notice = [this, &here, &other, why] {
      const auto tell = [this, &here, &other, why] {
        Link::End& own = link(here, other).ends[here.index];
        if (std::exchange(own.lost, true) || !here.running) return;
        perform(here, here.protocol.on_link_lost(other.info(), Error(ErrorCode::disconnected, why),
                                                 now_));
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

void MembershipSimulation::schedule_tick(Node& node) {
  at(now_ + Ms(245 + pick(10)), [this, &node] { tick(node); });
}

// The timer of a worker that is stopped runs as soon as it goes on.
void MembershipSimulation::tick(Node& node) {
  if (!node.running) return;
  if (node.stopped) return node.postponed.push_back([this, &node] { tick(node); });
  perform(node, node.protocol.on_tick(now_, links_of(node)));
  schedule_tick(node);
}

std::vector<MembershipProtocol::Link> MembershipSimulation::links_of(Node& node) {
  std::vector<MembershipProtocol::Link> links;
  for (const auto& other : nodes_) {
    if (other.get() == &node || !alive_at(node, other->info())) continue;
    Link& between = link(node, *other);
    Link::End& end = between.ends[node.index];
    if (end.lost || between.state == Link::State::ended) continue;
    const bool bound = between.state == Link::State::bound;
    const WorkerInfo& info = other->info();
    links.push_back({info.id, info.epoch, end.heard, std::exchange(end.sent, false), bound});
  }
  return links;
}

void MembershipSimulation::schedule_work(Node& node) {
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

void MembershipSimulation::perform(Node& node, Effects effects) {
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
    const std::string who = to_string(node.info()) + " hears of " + to_string(about) + " epoch " +
                            std::to_string(about.epoch);
    Node* subject = node_of(about);
    switch (event.kind) {
      case Kind::joined:
        if (!node.joined.insert(key(about)).second) fail(who + " joining twice");
        // What became of a connection before says nothing.
        if (subject != nullptr) link(node, *subject).ends[node.index].lost = false;
        for (const auto& each : node.joined) {
          if (each.first == about.id.value() && each.second < about.epoch &&
              !node.over.contains(each))
            fail(who + " joining before its former life is over");
        }
        break;
      case Kind::dead:
        ++counts_.verdicts;
        if (!node.over.insert(key(about)).second) fail(who + " being over twice");
        break;
      case Kind::left:
        ++counts_.left;
        if (!node.over.insert(key(about)).second) fail(who + " being over twice");
        break;
      case Kind::fenced:
        ++counts_.fenced;
        if (!declared_.contains(key(node.info())))
          fail(to_string(node.info()) + " is fenced, but was not declared dead");
        break;
    }
  }
  for (auto& [to, notice] : effects.send) {
    if (Node* other = node_of(to)) send(node, *other, {Frame::Kind::notice, std::move(notice)});
  }
  for (const WorkerInfo& to : effects.heartbeats) {
    if (Node* other = node_of(to))
      send(node, *other, {Frame::Kind::heartbeat, {}, node.protocol.digest()});
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
    Node* joiner = node_of(answer.notice.about);
    if (joiner == nullptr || !reaches(node, *joiner)) continue;
    if (answer.notice.step == Notice::Step::welcome) check_welcome(node, answer.notice);
    at(now_ + delay(), [this, joiner, notice = answer.notice] {
      if (!joiner->running || joiner->stopped || joiner->member || joiner->refused) return;
      if (notice.step == Notice::Step::refusal) {
        ++counts_.refused;
        joiner->refused = true;
        end_process(*joiner);
        return;
      }
      ++counts_.welcomed;
      joiner->member = true;
      perform(*joiner, joiner->protocol.on_welcome(notice, now_));
      schedule_tick(*joiner);
      schedule_work(*joiner);
      if (early_joins_ > 0 && pick(2) == 0) {
        --early_joins_;
        fail_early(*joiner);
      }
    });
  }
  if (effects.leave_done && node.leaving) end_process(node);
}

void MembershipSimulation::report(Node& node, Node& about, Ms after, std::optional<bool> answered,
                                  Time deadline) {
  at(now_ + after, [this, &node, &about, answered, deadline] {
    const auto tell = [this, &node, &about, answered, deadline] {
      // Its timer and its readers race.
      const bool timer_first = now_ > deadline && pick(2) == 0;
      const auto known = timer_first && answered ? std::optional(false) : answered;
      as_judge_ = decides(node);  // whatever was so when it began
      const Link& between = link(node, about);
      const bool connected =
          between.state == Link::State::bound && !between.ends.at(node.index).lost;
      perform(node, node.protocol.on_probe(about.info(), known, now_, connected));
      as_judge_ = false;
    };
    if (node.stopped) {
      node.postponed.push_back(tell);
    } else if (node.running) {
      tell();
    }
  });
}

void MembershipSimulation::probe(Node& node, Node& about, Ms limit) {
  const Time deadline = now_ + limit;
  // It may close the connection before it has read that.
  if (const auto verdict = node.protocol.obituary(about.info());
      verdict && pick(2) == 0 && about.running && !about.stopped && reaches(node, about)) {
    at(now_ + delay(), [this, &node, &about, notice = *verdict] {
      if (about.running && !about.stopped)
        perform(about, about.protocol.on_notice(node.info(), notice, now_));
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

void MembershipSimulation::wait_for_answer(Node& node, Node& about, Ms left, Time deadline) {
  if (!about.running && reaches(node, about)) return report(node, about, delay(), false, deadline);
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
        perform(node, node.protocol.on_notice(about.info(), notice, now_));
    });
  }
  report(node, about, delay(), true, deadline);
}

void MembershipSimulation::end_process(Node& node) {
  node.running = false;
  for (const auto& other : nodes_) {
    if (other.get() != &node && links_.contains(std::minmax(node.index, other->index)))
      end_link(node, *other, "the peer closed the connection");
  }
}

// Asks the members in the order of their ids until one answers.
void MembershipSimulation::ask_to_join(Node& joiner, std::size_t first) {
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
      perform(asked, asked.protocol.on_join(ticket, {joiner.info(), {}, {}}, now_));
    });
  }
  at(now_ + Ms(there ? 6000 : 200), [this, &joiner, first] { ask_to_join(joiner, first + 1); });
}

void MembershipSimulation::run() {
  now_ = Time(std::chrono::hours(1));
  next_id_ = static_cast<std::uint32_t>(options_.workers);
  for (std::uint32_t id = 0; id < next_id_; ++id) add_node(id, 1, true);
  std::vector<KnownLife> all;
  for (const auto& node : nodes_) all.push_back({{node->info(), {}, {}}});
  for (const auto& node : nodes_) {
    node->protocol.start(all);
    for (const KnownLife& life : all)
      node->joined.insert({life.card.info.id.value(), life.card.info.epoch});
    schedule_tick(*node);
    schedule_work(*node);
  }
  inject();
  advance_to(now_ + kFaults + Ms(9000));
  calm_ = true;
  advance_to(now_ + kRest);
  if (failure_.empty()) check_rest();
}

}  // namespace stitch::rpc::testing
