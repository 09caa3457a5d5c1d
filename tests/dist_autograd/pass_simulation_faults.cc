// What goes wrong in the simulation of a pass, and what must hold at its end.

#include <algorithm>

#include "tests/dist_autograd/pass_simulation.h"

namespace stitch::dist_autograd::testing {

void PassSimulation::abort(std::size_t at) {
  Worker& worker = workers_[at];
  if (!worker.protocol->fail()) return;
  worker.failed = true;
  worker.context_failed = true;
  tell_abort(at);
  worker.stop = true;
  worker.scheduled = true;
}

void PassSimulation::tell_abort(std::size_t at) {
  for (const WorkerId to : workers_[at].protocol->concerned()) {
    if (to.value() != at) send({Kind::abort, at, to.value(), {}, {}, {}, {}});
  }
}

void PassSimulation::kill(std::size_t victim) {
  Worker& worker = workers_[victim];
  if (!worker.alive) return;
  faulty_ |= takes_part(victim);
  worker.alive = false;
  std::erase_if(messages_, [&](const Message& message) { return message.to == victim; });
  std::erase_if(tasks_, [&](const Task& task) { return task.worker == victim; });
  for (std::size_t w = 0; w < workers_.size(); ++w) {
    if (workers_[w].alive) losses_.emplace_back(w, victim);
  }
}

// The connection of two live workers breaks.
void PassSimulation::cut(std::size_t one, std::size_t other) {
  if (!workers_[one].alive || !workers_[other].alive) return;
  faulty_ |= takes_part(one) && takes_part(other);
  cuts_.insert({one, other});
  cuts_.insert({other, one});
  losses_.emplace_back(one, other);
  losses_.emplace_back(other, one);
}

// Whether the pass needs the worker. Without a node that the loss uses it gets no message.
bool PassSimulation::takes_part(std::size_t worker) const {
  return std::any_of(nodes_.begin(), nodes_.end(),
                     [&](const Node& node) { return node.worker == worker && node.used; });
}

void PassSimulation::lie(wire::Ack& ack) {
  for (std::size_t w = 0; w < workers_.size(); ++w) {
    if (takes_part(w) || w == root_ || !chance(0.5)) continue;
    ack.participants.push_back(info(w).id);
    faulty_ = lied_ = true;
  }
}

// Messages that the peer sent and that have not been read yet are lost. MARK and GRADIENTS may
// have been read and wait for a thread: they are handled later. A DONE may not have been written
// yet.
void PassSimulation::lose(std::size_t at, std::size_t peer) {
  if (!workers_[at].alive) return;
  lost_.emplace(at, peer);
  std::erase_if(messages_, [&](const Message& message) {
    if (message.from != peer || message.to != at) return false;
    return (message.kind != Kind::mark && message.kind != Kind::gradients) || chance(0.5);
  });
  const auto unwritten = std::find_if(messages_.begin(), messages_.end(), [&](const Message& m) {
    return m.kind == Kind::done && m.from == at && m.to == peer;
  });
  if (unwritten != messages_.end() && chance(0.5)) {
    messages_.erase(unwritten);
    done_not_sent(at);
  }
  check_lost(at, peer);
}

void PassSimulation::check_lost(std::size_t at, std::size_t peer) {
  const Worker& worker = workers_[at];
  if (lost_.contains({at, peer}) && worker.protocol && worker.protocol->needs(info(peer).id))
    abort(at);
}

// Some of the worker's nodes that the loss uses have run, others have not.
bool PassSimulation::ran_partly(std::size_t worker) const {
  bool some = false, all = true;
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].worker != worker || !nodes_[i].used) continue;
    some |= states_[i].ran;
    all &= states_[i].ran;
  }
  return some && !all;
}

// Whether a reader would get them there.
bool PassSimulation::gives_out_partial_sums(std::size_t worker) const {
  return !workers_[worker].context_failed && !workers_[worker].unreadable && ran_partly(worker);
}

void PassSimulation::check_rest() {
  const bool root_alive = workers_[root_].alive;
  bool any_failed = false;
  for (std::size_t w = 0; w < workers_.size(); ++w) {
    const Worker& worker = workers_[w];
    if (!worker.alive || !worker.protocol) continue;
    any_failed |= worker.failed;
    if (!worker.removed) fail("at rest, the pass has not ended on " + name(w));
    if (gives_out_partial_sums(w)) fail("the sums of " + name(w) + " are partial");
  }
  if (!root_alive) return;
  if (any_failed && succeeded_) fail("the root has succeeded, but another worker has failed");
  if (lied_ && succeeded_) fail("the root has succeeded without one that was named");
  if (!succeeded_) {
    if (!faulty_) fail("the pass has failed for no reason");
    for (std::size_t w = 0; w < workers_.size(); ++w) {
      if (!workers_[w].alive || !workers_[w].protocol || workers_[w].context_failed) continue;
      // The sums of a worker that was done are complete.
      if (!workers_[w].said_done || !cuts_.contains({w, root_}))
        fail("the pass has failed, but " + name(w) + " has not heard of it");
    }
    return;
  }
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    const Worker& worker = workers_[nodes_[i].worker];
    if (!worker.alive) continue;
    if (nodes_[i].used && !states_[i].ran) fail("the pass has succeeded without a node it needs");
    if (options_.mode == PassMode::fast && nodes_[i].kind == NodeKind::send && worker.participant &&
        !states_[i].received)
      fail("fast mode has succeeded, but a result was not used");
  }
}

}  // namespace stitch::dist_autograd::testing
