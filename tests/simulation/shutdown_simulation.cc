// How a history of shutdowns begins, and what must hold in it.
#include "tests/simulation/shutdown_simulation.h"

#include <algorithm>

#include "tests/simulation/shutdown_world.h"

namespace stitch::rpc::shutdown_simulation {
namespace {

class Rules final : public World {
 public:
  Rules(std::uint64_t number, Wrong wrong) : World(number, wrong) {}

 private:
  void play() override {
    set_up();
    run_until_quiet(400'000, [this] { return !over() && step(); });
    if (!failed()) check_end();
  }
  void set_up() {
    nodes_.reserve(kMaxNodes);
    slots_ = 2 + pick(std::size_t{4});
    const auto profile = pick(8);
    short_limits_ = profile == 2 || profile == 7;
    hanging_limits_ = profile == 6 || (profile == 7 && one_in(2));
    some_only_ = profile == 2 || (profile == 7 && one_in(3));
    flaky_ = profile == 5 || profile == 7;
    all_in_time_ = !short_limits_ && !hanging_limits_ && !some_only_;
    hangs_left_ = hanging_limits_ ? 1 : 0;
    patient_ = !short_limits_ && !some_only_ && one_in(2);
    for (Link& each : links_)
      each.delay = of_any_size(microseconds(10), one_in(16) ? kSlowDelay : kLongestDelay);
    const bool deaths = profile == 3 || profile == 5 || profile == 7;
    const bool returns = deaths && one_in(2);
    for (std::size_t i = 0; i < slots_; ++i) {
      add_node(i);
      if (!(some_only_ && one_in(3))) {
        // Where others come back, the shutdown has to last; the patient wait for one that works on.
        const bool last = i + 1 == slots_;
        const bool late = returns && last && one_in(2);
        const bool works = patient_ && last && one_in(4);
        will_begin(i, now_ + of_any_size(microseconds(100), milliseconds(works  ? 40'000
                                                                         : late ? 800
                                                                                : 150)));
      }
      will_work(i, now_);
    }
    const auto any_time = [this] { return now_ + up_to(milliseconds(one_in(4) ? 2000 : 200)); };
    if (deaths) {
      for (int k = 1 + pick(2); k > 0; --k) {
        const std::size_t slot = returns && one_in(2) ? 0 : any_slot();
        const bool comes_back = returns && !one_in(4);
        at(any_time(), [this, slot, comes_back] { die(present(slot), comes_back); });
      }
    }
    if (profile == 4 || profile == 5 || profile == 7) {
      for (int k = 1 + pick(3); k > 0; --k)
        at(any_time(), [this, a = any_slot(), b = any_slot()] { cut(present(a), present(b)); });
    }
  }
  // A round of this leader begins: what is on its way now crosses its beginning.
  void begins_round(std::size_t leader, const Protocol::Effects& effects,
                    const Lives& lives) override {
    Node& node = nodes_[leader];
    count("rounds");
    note(name_of(leader), " begins a round");
    node.heard_of_loss = false;
    node.polled = {leader};
    for (const auto& each : effects.sends) node.polled.insert(lives[each.to.value()]);
    const unsigned bit = 1U << leader;
    for (auto& [number, packet] : packets_) packet.work.excepted |= bit;
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      const bool outside = !node.polled.contains(i);
      for (auto& [id, each] : nodes_[i].handlers)
        each.work.excepted = outside ? each.work.excepted | bit : each.work.excepted & ~bit;
      for (auto& [id, each] : nodes_[i].calls) each.excepted &= ~bit;
    }
  }
  void said_go(std::size_t leader, const Protocol::Effects& effects, const Lives& lives) override {
    Node& node = nodes_[leader];
    for (const auto& each : effects.sends) node.told.insert(lives[each.to.value()]);
    auto group = node.told;
    group.insert(leader);
    const bool strict = !node.heard_of_loss;
    note(name_of(leader), " says GO");
    const auto check = [&](const char* what, unsigned excepted, std::size_t where) {
      const bool may_be = ((excepted >> leader) & 1U) != 0 && !strict;
      if (may_be) count("crossings");
      if (!may_be) fail(name_of(leader), " said GO while ", what, " ", name_of(where));
    };
    for (const auto& [number, packet] : packets_) {
      if (group.contains(packet.from) && group.contains(packet.to) && running(packet.from) &&
          running(packet.to) && !link(packet.from, packet.to).passes_until)
        check("a message is on its way to", packet.work.excepted, packet.to);
    }
    for (const std::size_t i : node.known) {
      const Node& other = nodes_[i];
      const auto since = node.known_since.find(i);
      const bool new_here = since != node.known_since.end() && since->second + kSlack > now_;
      if (running(i) && !node.lost.contains(i) && !new_here &&
          !(other.begin && *other.begin <= now_))
        fail(name_of(leader), " said GO although ", name_of(i), " had not called shutdown");
    }
    for (const std::size_t i : group) {
      if (!running(i)) continue;
      for (const auto& [id, each] : nodes_[i].handlers)
        check("a handler runs on", each.work.excepted, i);
      for (const auto& [id, each] : nodes_[i].calls) check("a call is made by", each.excepted, i);
    }
  }

  void check_end_of(std::size_t at_node) override {
    const Node& node = nodes_[at_node];
    const std::string name = name_of(at_node);
    // A follower may see by its next READY only that all are ready.
    const Time limit = node.patient ? last_begin_ + node.limit + std::chrono::seconds(2)
                                    : node.deadline + node.limit;
    if (now_ > limit + kSlack) return fail(name, " ended after its limit");
    const auto& error = node.protocol->error();
    if (error) {
      count("timeouts");
      if (all_in_time_) return fail(name, " ended with an error: ", error->what());
      return check_error(at_node, error->what());
    }
    if (all_in_time_ && now_ > last_begin_ + std::chrono::seconds(20))
      return fail(name, " waited for nothing");
    count("graceful");
    if (counted("deaths") + counted("cuts") + counted("timeouts") == 0) {
      if (!packets_.empty()) return fail(name, " ended while a message was on its way");
      for (const Node& each : nodes_) {
        if (each.served != 0 || !each.calls.empty())
          return fail(name, " ended while a message was being handled");
        if (!each.begin || *each.begin > now_)
          return fail(name, " ended before all had called shutdown");
      }
    }
    if (now_ >= node.protocol->deadline()) return;
    for (const std::size_t to : node.told) {
      if (running(to) && !nodes_[to].go_received && !node.lost.contains(to))
        return fail(name, " closed before ", name_of(to), " knew that it may");
    }
  }

  void check_error(std::size_t at_node, const std::string& text) {
    const Node& node = nodes_[at_node];
    const std::string self = to_string(worker_named(id_of(at_node)));
    const std::string head = "shutdown of " + self + " was not graceful: ";
    if (text.find(head) != 0) return fail("an error with another beginning: ", text);
    const std::string why = text.substr(head.size());
    const auto says = [&](const char* what) { return why.find(what) == 0; };
    const bool not_called = says("no shutdown was called within the time limit on");
    const bool running_calls = says("calls are still running on");
    const bool no_go = says("no GO within the time limit from");
    if (says("messages are still in flight")) return;
    if (!not_called && !running_calls && !no_go && !says("no answer within the time limit from"))
      return fail("an unknown error: ", text);
    const auto ends = counted("graceful") + counted("timeouts");  // this one included
    int named = 0;
    for (const std::size_t i : node.known) {
      const bool names = why.find(to_string(worker_named(id_of(i)))) != std::string::npos;
      const Node& other = nodes_[i];
      named += names ? 1 : 0;
      if (names && i == at_node && !running_calls) return fail("it names itself: ", text);
      const auto lost = node.lost_at.find(i);
      const bool known_lost = lost != node.lost_at.end();
      if (names && known_lost && lost->second + kKnownAfter < now_)
        return fail("it names a worker that was lost: ", text);
      const bool undisturbed = counted("deaths") + counted("cuts") == 0 && ends == 1 && !flaky_;
      if (not_called && i != at_node) {
        const bool late = !other.begin || *other.begin > now_;
        if (names && !late && undisturbed && *other.begin + kKnownAfter < node.deadline)
          return fail("it names a worker that had called shutdown: ", text);
        const auto since = node.known_since.find(i);
        const bool new_here = since != node.known_since.end() && since->second + kSlack > now_;
        if (!names && late && !known_lost && !new_here) return fail("it does not name all: ", text);
      }
      if (running_calls && !names && hanging_ == i && !known_lost && running(i) &&
          hanging_since_ + kKnownAfter < now_)
        return fail("it does not name the worker that hangs: ", text);
    }
    if (named == 0) return fail("it names no worker: ", text);
    if (no_go && named != 1) return fail("it names not just the leader: ", text);
  }
  bool over() const {
    return std::all_of(nodes_.begin(), nodes_.end(),
                       [](const Node& node) { return node.dead || node.ended || !node.begin; });
  }
  void check_end() {
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (running(i) && nodes_[i].begin) return fail(name_of(i), " did not end");
    }
  }
};

}  // namespace

simulation::Outcome run(std::uint64_t number, Wrong wrong) { return Rules(number, wrong).run(); }

}  // namespace stitch::rpc::shutdown_simulation
