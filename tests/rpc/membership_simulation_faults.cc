// What goes wrong in a history of a world, and when.
#include <algorithm>

#include "tests/rpc/membership_simulation.h"
#include "tests/rpc/membership_simulation_parts.h"

namespace stitch::rpc::testing {

void MembershipSimulation::kill(bool restart) {
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

void MembershipSimulation::stop(int milliseconds) {
  if (Node* victim = random_running()) stop(*victim, milliseconds);
}

void MembershipSimulation::stop(Node& victim, int milliseconds) {
  victim.stopped = true;
  at(now_ + Ms(milliseconds), [this, &victim] {
    if (victim.frozen) return;
    victim.stopped = false;
    auto postponed = std::exchange(victim.postponed, {});
    // Its timer and its readers race.
    std::shuffle(postponed.begin(), postponed.end(), random_);

    for (auto& each : postponed) at(now_ + Ms(pick(5)), std::move(each));
  });
}

void MembershipSimulation::freeze(Node& victim) {
  victim.stopped = victim.frozen = true;
  check_noticed(victim);
}

// Perhaps before its first look, perhaps while it connects.
void MembershipSimulation::fail_early(Node& victim) {
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

void MembershipSimulation::pause() {
  Node* victim = random_running();
  if (victim == nullptr) return;
  at_fault_.insert({victim->info().id.value(), victim->info().epoch});
  stop(*victim, 2100 + pick(800));
}

void MembershipSimulation::isolate() {
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
void MembershipSimulation::replace_judge() {
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

void MembershipSimulation::partition() {
  if (!apart_.empty()) return;
  for (const auto& node : nodes_) {
    if (pick(2) == 0) apart_.insert(node->index);
  }
  at(now_ + Ms(500 + pick(8000)), [this] { apart_.clear(); });
}

void MembershipSimulation::inject() {
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
  for (int i = 0; i < options_.slow; ++i) {
    const int a = pick(2) * pick(options_.workers);
    const int b = pick(options_.workers);
    if (a != b) slow_[std::minmax<std::size_t>(a, b)] = Ms(1000 + pick(9000));
  }
  for (int i = 0; i < options_.failing; ++i) {
    const int a = pick(2) * pick(options_.workers);
    const int b = pick(options_.workers);
    if (a != b) failing_[std::minmax<std::size_t>(a, b)] = later(10'000) + Ms(500);
  }
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
    perform(*leaver, leaver->protocol.leave(now_));
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

}  // namespace stitch::rpc::testing
