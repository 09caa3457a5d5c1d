// What goes wrong in a history of a world, when, and what must hold.
#include "tests/simulation/membership_simulation.h"

#include <algorithm>

#include "tests/simulation/membership_world.h"

namespace stitch::rpc::membership_simulation {
namespace {

constexpr Ms kFaults{12'000};  // faults begin within this time
constexpr Ms kRest{40'000};    // and then all comes to rest
// One to which none is connected: two timeouts until it is absent, two probes, and looks between.
// Each worker that ends while it looks for another has the next one begin anew.
constexpr Ms kNoticed{10'500};

class Faults final : public World {
 public:
  Faults(std::uint64_t number, const Options& options) : World(number, options) {}

 private:
  void play() override {
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
    run_until(now_ + kFaults + Ms(9000));
    calm_ = true;
    run_until(now_ + kRest);
    if (!failed()) check_rest();
  }

  // ---- what goes wrong
  [[nodiscard]] Time later(int milliseconds) { return now_ + Ms(pick(milliseconds)); }

  void kill(bool restart) {
    Node* victim = random_running();
    if (victim == nullptr || (options_.blocks > 0 && victim->info().id.value() == 0)) return;
    end_process(*victim);
    check_noticed(*victim);
    if (!restart) return;
    at(later(5000), [this, victim] {
      Node& again = add_node(victim->info().id.value(), victim->info().epoch + 1, false);
      ask_to_join(again, 0);
    });
  }
  void stop(int milliseconds) {
    if (Node* victim = random_running()) stop(*victim, milliseconds);
  }
  void stop(Node& victim, int milliseconds) {
    victim.stopped = true;
    note(victim.info(), " stops for ", milliseconds, " ms");
    at(now_ + Ms(milliseconds), [this, &victim] {
      if (victim.frozen) return;
      victim.stopped = false;
      auto postponed = std::exchange(victim.postponed, {});
      // Its timer and its readers race.
      std::shuffle(postponed.begin(), postponed.end(), random_);

      for (auto& each : postponed) at(now_ + Ms(pick(5)), std::move(each));
    });
  }
  void freeze(Node& victim) {
    victim.stopped = victim.frozen = true;
    note(victim.info(), " stops for good");
    check_noticed(victim);
  }
  // Perhaps before its first look, perhaps while it connects.
  void fail_early(Node& victim) override {
    victim.doomed = true;
    at(later(500), [this, &victim] {
      if (!victim.takes_part() || victim.frozen) return;
      if (pick(2) == 0) {
        end_process(victim);
        check_noticed(victim);
      } else {
        freeze(victim);
      }
    });
  }
  void pause() {
    Node* victim = random_running();
    if (victim == nullptr) return;
    at_fault_.insert({victim->info().id.value(), victim->info().epoch});
    stop(*victim, 2100 + pick(800));
  }
  void isolate() {
    Node* victim = random_running();
    if (victim == nullptr || !apart_.empty()) return;
    for (const auto& node : nodes_) {  // of two workers, each has lost all others
      if (node.get() == victim || nodes_.size() == 2)
        at_fault_.insert({node->info().id.value(), node->info().epoch});
    }
    apart_.insert(victim->index);
    at(now_ + Ms(2100 + pick(300)), [this] { apart_.clear(); });
  }
  // While the next one tries whether those two live, the former one joins again.
  void replace_judge() {
    Node* a = random_running();
    Node* b = random_running();
    if (a == nullptr || a == b || a->info().id.value() == 0 || b->info().id.value() == 0) return;
    for (const auto& node : nodes_) {
      if (node->info().id.value() != 0 || !node->takes_part()) continue;
      end_process(*node);
      end_link(*a, *b, "connection reset");
      at(later(4000),
         [this, epoch = node->info().epoch + 1] { ask_to_join(add_node(0, epoch, false), 0); });
      return;
    }
  }
  void partition() {
    if (!apart_.empty()) return;
    for (const auto& node : nodes_) {
      if (pick(2) == 0) apart_.insert(node->index);
    }
    at(now_ + Ms(500 + pick(8000)), [this] { apart_.clear(); });
  }
  void inject() {
    const auto often = [this](int count, const std::function<void()>& fault) {
      for (int i = 0; i < count; ++i) at(later(kFaults.count()), fault);
    };
    for (int i = 0; i < options_.deaths; ++i)
      at(later(kFaults.count()), [this, again = i < options_.restarts] { kill(again); });
    often(options_.stops, [this] { stop(500 + pick(8000)); });
    for (int i = 0; i < options_.short_stops; ++i)
      at(later(1000) + Ms(4000 * i), [this] { stop(100 + pick(600)); });
    // All are connected by then.
    for (int i = 0; i < options_.pauses; ++i) at(later(5000) + Ms(3000), [this] { pause(); });
    for (int i = 0; i < options_.isolations; ++i) at(later(5000) + Ms(3000), [this] { isolate(); });
    often(options_.freezes, [this] {
      if (Node* victim = random_running()) freeze(*victim);
    });
    for (int i = 0; i < options_.early; ++i) {
      if (options_.joins > 0 && pick(2) == 0) {
        ++early_joins_;
      } else if (pick(2) == 0) {  // of those that the others ask
        const auto first =
            std::ranges::find_if(nodes_, [](const auto& node) { return !node->doomed; });
        if (first != nodes_.end()) fail_early(**first);
      } else if (Node* victim = random_running()) {
        fail_early(*victim);
      }
    }
    const auto pairs = [this](int count, const auto& fault) {
      for (int i = 0; i < count; ++i) {
        const int a = pick(2) * pick(options_.workers);
        const int b = pick(options_.workers);
        if (a != b) fault(std::minmax<std::size_t>(a, b));
      }
    };
    pairs(options_.slow, [this](auto pair) { slow_[pair] = Ms(1000 + pick(9000)); });
    pairs(options_.failing, [this](auto pair) { failing_[pair] = later(10'000) + Ms(500); });
    for (int i = 0; i < options_.strained; ++i) {
      // Others hear the first worker, of which the last probe may therefore fail, too.
      const bool of_the_first =
          i == 0 && options_.workers > 2 && options_.freezes == 0 && pick(2) == 0;
      const int a = of_the_first ? 1 + pick(options_.workers - 1) : pick(options_.workers);
      const int b = of_the_first ? 0 : pick(options_.workers);
      if (a == b) continue;
      const Ms takes(1600 + pick(of_the_first ? 7000 : 1200));
      strained_[{a, b}] = takes;
      slow_[std::minmax<std::size_t>(a, b)] = takes;
    }
    often(options_.partitions, [this] { partition(); });
    often(options_.cuts, [this] {
      for (auto& [pair, between] : links_) {
        if (between->state != Link::State::bound || pick(4) != 0) continue;
        return end_link(*nodes_[pair.first], *nodes_[pair.second], "connection reset");
      }
    });
    often(options_.blocks, [this] {
      Node* a = random_running();
      Node* b = random_running();
      if (a == nullptr || a == b || a->info().id.value() == 0 || b->info().id.value() == 0) return;
      blocked_.insert(std::minmax(a->index, b->index));
    });
    often(options_.returns, [this] { replace_judge(); });
    often(options_.joins, [this] { ask_to_join(add_node(next_id_++, 1, false), 0); });
    const auto leave = [this] {
      Node* leaver = random_running();
      if (leaver == nullptr) return;
      leaver->leaving = true;
      carry_out(*leaver, leaver->protocol.leave(now_));
    };
    often(options_.leaves, leave);
    const Time together = later(kFaults.count());
    for (int i = 0; i < options_.together; ++i) at(together + Ms(pick(50)), leave);
    often(options_.duplicates, [this] {
      Node* original = random_running();
      if (original == nullptr) return;
      ask_to_join(add_node(original->info().id.value(), original->info().epoch + 1, false), 0);
    });
  }

  // ---- what must hold
  // Whether no other is there to decide about what it suspects.
  [[nodiscard]] bool decides(const Node& node) override {
    return std::none_of(nodes_.begin(), nodes_.end(), [&](const auto& other) {
      return other->info().id < node.info().id && alive_at(node, other->info()) &&
             !link(node, *other).ends[node.index].lost;
    });
  }
  // Before the connections that end by it are ended.
  void check_verdict(const Node& at, const MembershipProtocol::Event& event,
                     const Node& subject) override {
    const WorkerInfo& about = subject.info();
    const std::pair key(about.id.value(), about.epoch);
    const std::string who = to_string(at.info()) + " hears of " + life_text(about);
    if (declared_.insert(key).second && link(at, subject).ends[at.index].lost && as_judge_)
      out_of_touch_.insert(key);
    // Of one that has stopped for a while, which no other was connected to.
    const bool none_saw = options_.pauses > 0 && options_.slow > 0;
    const bool out_of_touch =
        (options_.cuts + options_.blocks + options_.returns > 0 || none_saw) &&
        out_of_touch_.contains(key);
    const int silent = options_.stops + options_.partitions + options_.pauses +
                       options_.isolations + options_.freezes + options_.early;
    // One that stops for good can be told from the others.
    const bool may_be_silent = silent - options_.freezes - options_.early > 0 || subject.frozen;
    if (subject.running && !may_be_silent && !subject.protocol.fenced() && !out_of_touch)
      fail(who, " being dead, though it runs and its judge can reach it");
    if (options_.deaths + options_.returns + options_.blocks + silent == 0 && !out_of_touch)
      fail(who, " being dead, in a world without deaths: ", event.reason.what());
    if (options_.pauses + options_.isolations > 0 && !out_of_touch && !at_fault_.contains(key))
      fail(who, " being dead for the fault of another: ", event.reason.what());
    if (options_.cuts == 1 && options_.deaths + silent == 0 &&
        (about.id.value() == 0 || declared_.size() > 1))
      fail(who, " being dead, though at most one other had to go: ", event.reason.what());
  }

  // Every worker that can be reached and runs knows the new one when it is welcome.
  void check_welcome(const Node& sponsor, const WorkerInfo& joiner) override {
    if (options_.stops + options_.short_stops + options_.partitions + options_.cuts +
            options_.blocks + options_.pauses + options_.isolations + options_.returns >
        0)
      return;
    for (const auto& node : nodes_) {
      if (!node->takes_part() || node->leaving || node->frozen || node.get() == &sponsor) continue;
      if (sponsor.protocol.state(node->info()) != LifeState::alive) continue;
      if (!node->protocol.state(joiner))
        fail(joiner, " is welcome before ", node->info(), " knows");
    }
  }
  // One that is over is noticed by all others in time, also where none has a connection to it.
  void check_noticed(const Node& victim) {
    if (options_.stops + options_.short_stops + options_.partitions + options_.cuts +
            options_.blocks + options_.pauses + options_.isolations + options_.returns +
            options_.slow + options_.failing + options_.strained + options_.restarts +
            options_.leaves + options_.together >
        0)
      return;
    check_noticed_by(now_ + kNoticed, victim, true);
  }
  void check_noticed_by(Time deadline, const Node& victim, bool again) {
    at(deadline, [this, &victim, deadline, again] {
      if (again) {  // others may have ended meanwhile
        const auto lives = [](const auto& node) { return node->takes_part() && !node->frozen; };
        const auto first = std::ranges::find_if(nodes_, lives);
        return check_noticed_by(deadline + (first - nodes_.begin()) * kNoticed, victim, false);
      }
      for (const auto& node : nodes_) {
        if (node->takes_part() && !node->frozen && !node->leaving && alive_at(*node, victim.info()))
          fail(node->info(), " has not noticed the end of ", victim.info());
      }
    });
  }

  void check_rest() {
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
          return fail(a->info(), " knows that ", info, " epoch ", info.epoch,
                      " is over, and has told nothing above it");
      }
      if (stranded(*a)) continue;
      for (const auto& b : nodes_) {
        if (a == b || b->refused || stranded(*b)) continue;
        const std::string pair = life_text(a->info()) + " and " + life_text(b->info());
        if (!b->running || b->frozen || b->protocol.fenced()) {
          if (alive_at(*a, b->info()))
            return fail(pair, ": the second is over, the first believes it alive");
          continue;
        }
        if (!b->member) continue;
        if (alive_at(*a, b->info()) && link(*a, *b).ends[a->index].lost && decides(*a) &&
            !waits_for_news(*a))
          return fail(pair, ": both live without a connection for good, and the first decides");
        if (alive_at(*a, b->info()) != alive_at(*b, a->info()))
          return fail(pair, ": only one believes the other alive");
        if (options_.partitions + options_.stops + options_.pauses + options_.isolations == 0 &&
            !alive_at(*a, b->info()))
          return fail(pair, ": both run and do not know each other");
        if (link(*a, *b).state == Link::State::bound &&
            a->protocol.digests() != b->protocol.digests())
          return fail(pair, ": they are connected and disagree about others");
      }
    }
  }
};

}  // namespace

simulation::Outcome run(std::uint64_t number, const Options& options) {
  return Faults(number, options).run();
}

}  // namespace stitch::rpc::membership_simulation
