// What must hold in a history of a world.
#include <algorithm>

#include "tests/rpc/membership_simulation.h"
#include "tests/rpc/membership_simulation_parts.h"

namespace stitch::rpc::testing {

namespace {
// One to which none is connected: two timeouts until it is absent, two probes, and looks between.
// Each worker that ends while it looks for another has the next one begin anew.
constexpr std::chrono::milliseconds kNoticed{9'500};
}  // namespace

bool MembershipSimulation::alive_at(const Node& node, const WorkerInfo& info) {
  return node.protocol.state(info) == LifeState::alive;
}

// Whether no other is there to decide about what it suspects.
bool MembershipSimulation::decides(const Node& node) {
  return std::none_of(nodes_.begin(), nodes_.end(), [&](const auto& other) {
    return other->info().id < node.info().id && alive_at(node, other->info()) &&
           !link(node, *other).ends[node.index].lost;
  });
}

// Before the connections that end by it are ended.
void MembershipSimulation::check_verdict(const Node& at, const MembershipProtocol::Event& event,
                                         const Node& subject) {
  const WorkerInfo& about = subject.info();
  const std::pair key(about.id.value(), about.epoch);
  const std::string who = to_string(at.info()) + " hears of " + to_string(about) + " epoch " +
                          std::to_string(about.epoch);
  if (declared_.insert(key).second && link(at, subject).ends[at.index].lost && as_judge_)
    out_of_touch_.insert(key);
  // Of one that has stopped for a while, which no other was connected to.
  const bool none_saw = options_.pauses > 0 && options_.slow > 0;
  const bool out_of_touch = (options_.cuts + options_.blocks + options_.returns > 0 || none_saw) &&
                            out_of_touch_.contains(key);
  const int silent = options_.stops + options_.partitions + options_.pauses + options_.isolations +
                     options_.freezes + options_.early;
  // One that stops for good can be told from the others.
  const bool may_be_silent = silent - options_.freezes - options_.early > 0 || subject.frozen;
  if (subject.running && !may_be_silent && !subject.protocol.fenced() && !out_of_touch)
    fail(who + " being dead, though it runs and its judge can reach it");
  if (options_.deaths + options_.returns + options_.blocks + silent == 0 && !out_of_touch)
    fail(who + " being dead, in a world without deaths: " + event.reason.what());
  if (options_.pauses + options_.isolations > 0 && !out_of_touch && !at_fault_.contains(key))
    fail(who + " being dead for the fault of another: " + event.reason.what());
  if (options_.cuts == 1 && options_.deaths + silent == 0 &&
      (about.id.value() == 0 || declared_.size() > 1))
    fail(who + " being dead, though at most one other had to go: " + event.reason.what());
}

// Every worker that can be reached and runs knows the new one when it is welcome.
void MembershipSimulation::check_welcome(const Node& sponsor, const Notice& welcome) {
  if (options_.stops + options_.short_stops + options_.partitions + options_.cuts +
          options_.blocks + options_.pauses + options_.isolations + options_.returns >
      0)
    return;
  for (const auto& node : nodes_) {
    if (!node->takes_part() || node->leaving || node->frozen || node.get() == &sponsor) continue;
    if (sponsor.protocol.state(node->info()) != LifeState::alive) continue;
    if (!node->protocol.state(welcome.about))
      fail(to_string(welcome.about) + " is welcome before " + to_string(node->info()) + " knows");
  }
}

// One that is over is noticed by all others in time, also where none has a connection to it.
void MembershipSimulation::check_noticed(const Node& victim) {
  if (options_.stops + options_.short_stops + options_.partitions + options_.cuts +
          options_.blocks + options_.pauses + options_.isolations + options_.returns +
          options_.slow + options_.failing + options_.strained + options_.restarts +
          options_.leaves + options_.together >
      0)
    return;
  check_noticed_by(now_ + kNoticed, victim, true);
}

void MembershipSimulation::check_noticed_by(Time deadline, const Node& victim, bool again) {
  at(deadline, [this, &victim, deadline, again] {
    if (again) {  // others may have ended meanwhile
      const auto lives = [](const auto& node) { return node->takes_part() && !node->frozen; };
      const auto first = std::ranges::find_if(nodes_, lives);
      return check_noticed_by(deadline + (first - nodes_.begin()) * kNoticed, victim, false);
    }
    for (const auto& node : nodes_) {
      if (node->takes_part() && !node->frozen && !node->leaving && alive_at(*node, victim.info()))
        fail(to_string(node->info()) + " has not noticed the end of " + to_string(victim.info()));
    }
  });
}

void MembershipSimulation::check_rest() {
  // A worker that has joined through one that could not reach all, or was declared dead itself.
  const auto stranded = [&](const Node& node) {
    return options_.cuts + options_.blocks + options_.partitions + options_.stops +
                   options_.pauses + options_.isolations + options_.returns >
               0 &&
           std::any_of(nodes_.begin(), nodes_.end(), [&](const auto& other) {
             return other->takes_part() && !other->protocol.state(node.info());
           });
  };
  // Its judge has come back through a worker that it has lost; no other is connected to both.
  const auto waits_for_news = [&](const Node& node) {
    return options_.returns > 0 &&
           std::any_of(nodes_.begin(), nodes_.end(), [&](const auto& other) {
             return other->takes_part() && !node.protocol.state(other->info());
           });
  };
  for (const auto& a : nodes_) {
    if (!a->takes_part() || a->frozen) continue;
    for (const KnownLife& life : a->protocol.lives()) {
      const WorkerInfo& info = life.card.info;
      if (life.state != LifeState::alive && !a->over.contains({info.id.value(), info.epoch}))
        return fail(to_string(a->info()) + " knows that " + to_string(info) + " epoch " +
                    std::to_string(info.epoch) + " is over, and has told nothing above it");
    }
    if (stranded(*a)) continue;
    for (const auto& b : nodes_) {
      if (a == b || b->refused || stranded(*b)) continue;
      const std::string pair = to_string(a->info()) + " epoch " + std::to_string(a->info().epoch) +
                               " and " + to_string(b->info()) + " epoch " +
                               std::to_string(b->info().epoch);
      if (!b->running || b->frozen || b->protocol.fenced()) {
        if (alive_at(*a, b->info()))
          return fail(pair + ": the second is over, the first believes it alive");
        continue;
      }
      if (!b->member) continue;
      if (alive_at(*a, b->info()) && link(*a, *b).ends[a->index].lost && decides(*a) &&
          !waits_for_news(*a))
        return fail(pair + ": both live without a connection for good, and the first decides");
      if (alive_at(*a, b->info()) != alive_at(*b, a->info()))
        return fail(pair + ": only one believes the other alive");
      if (options_.partitions + options_.stops + options_.pauses + options_.isolations == 0 &&
          !alive_at(*a, b->info()))
        return fail(pair + ": both run and do not know each other");
      if (link(*a, *b).state == Link::State::bound && a->protocol.digest() != b->protocol.digest())
        return fail(pair + ": they are connected and disagree about others");
    }
  }
}

}  // namespace stitch::rpc::testing
