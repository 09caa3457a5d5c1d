#include "stitch/dist_autograd/pass_protocol.h"

#include <algorithm>

#include "stitch/base/name_list.h"

namespace stitch::dist_autograd {

namespace {

constexpr std::size_t kNamedCalls = 8;

Error protocol_error(const std::string& text) { return Error(ErrorCode::protocol, text); }

}  // namespace

void PassProtocol::set_graph(std::unique_ptr<PassGraph> graph) {
  graph_ = std::move(graph);
  delivered_.assign(graph_->size(), false);
}

PassEffects PassProtocol::begin() {
  PassEffects effects;
  if (!running()) return effects;
  if (!fast_) {
    std::vector<LinkId> reached;
    graph_->mark_roots(reached);
    send_marks(reached, effects);
  }
  begun_ = true;
  advance(effects);
  return effects;
}

PassEffects PassProtocol::on_mark(const WorkerInfo& from, const wire::Mark& mark) {
  PassEffects effects;
  if (!running()) return effects;
  if (fast_) throw protocol_error(stitch::to_string(from) + " sent a MARK in a fast pass");
  effects.new_peer = peers_.insert(from.id).second;
  std::vector<LinkId> reached;
  for (const std::uint64_t link : mark.links) {
    const std::uint32_t send = graph_->find(link);
    if (send == PassGraph::kNone) {
      throw protocol_error(
          "a call result used by the loss is unknown here; is forward still running?");
    }
    if (graph_->receiver(send) != from.id) {
      throw protocol_error(stitch::to_string(from) + " marked " + graph_->call(send) +
                           ", which was sent to another worker");
    }
    graph_->mark(send, reached);
  }
  if (is_root() || parent_) {
    effects.acks.push_back({from.id, {1, {}}});
  } else {
    parent_ = from.id;
  }
  send_marks(reached, effects);
  advance(effects);
  return effects;
}

PassEffects PassProtocol::on_ack(const WorkerInfo& from, const wire::Ack& ack) {
  PassEffects effects;
  if (!running()) return effects;
  std::uint64_t& owed_by = deficits_[from.id];
  if (ack.count > owed_by) {
    throw protocol_error(stitch::to_string(from) + " acknowledged more messages than it was sent");
  }
  owed_by -= ack.count;
  deficit_ -= ack.count;
  participants_.insert(ack.participants.begin(), ack.participants.end());
  advance(effects);
  return effects;
}

PassEffects PassProtocol::on_close_marking(const WorkerInfo& from) {
  PassEffects effects;
  if (!running()) return effects;
  if (from.id != root_)
    throw protocol_error(stitch::to_string(from) + " closed the marking of another worker's pass");
  if (phase_ != Phase::marking) return effects;
  peers_.insert(from.id);
  close_marking(effects);
  advance(effects);
  return effects;
}

PassEffects PassProtocol::on_done(const WorkerInfo& from, const wire::Done& done) {
  PassEffects effects;
  if (!running()) return effects;
  if (not_done_.erase(from.id) == 0) {
    throw protocol_error(stitch::to_string(from) +
                         " is done with a pass that does not wait for it");
  }
  unused_.unused_links += done.unused_links;
  unused_.unused_calls.insert(unused_.unused_calls.end(), done.unused_calls.begin(),
                              done.unused_calls.end());
  advance(effects);
  return effects;
}

PassEffects PassProtocol::on_gradients(const WorkerInfo& from,
                                       std::span<const std::uint32_t> sends) {
  PassEffects effects;
  if (!running()) return effects;
  effects.new_peer = peers_.insert(from.id).second;
  if (fast_) {
    if (is_root() || parent_) {
      ++owed_[from.id];
    } else {
      parent_ = from.id;
    }
  }
  for (const std::uint32_t send : sends) {
    if (delivered_[send])
      throw protocol_error(stitch::to_string(from) + " sent the gradients of a call twice");
    if (phase_ == Phase::marking_closed && !fast_ && !graph_->marked(send)) {
      throw protocol_error(stitch::to_string(from) +
                           " sent a gradient for a call that the loss does not use");
    }
    delivered_[send] = true;
    ++posted_;
    quiet_ = false;
  }
  effects.deliver = true;
  advance(effects);
  return effects;
}

bool PassProtocol::sending_gradients(WorkerId to) {
  if (!running()) return false;
  peers_.insert(to);
  ++writing_;
  if (fast_) {
    ++deficit_;
    ++deficits_[to];
  }
  return true;
}

PassEffects PassProtocol::gradients_written() {
  PassEffects effects;
  --writing_;
  advance(effects);
  return effects;
}

PassEffects PassProtocol::strand_quiet(std::uint64_t taken, bool resolved) {
  PassEffects effects;
  quiet_ = taken == posted_;
  resolved_ = resolved_ || resolved;
  advance(effects);
  return effects;
}

bool PassProtocol::fail() {
  if (!running()) return false;
  phase_ = Phase::failed;
  return true;
}

std::set<WorkerId> PassProtocol::concerned() const {
  std::set<WorkerId> workers = peers_;
  workers.insert(participants_.begin(), participants_.end());
  workers.insert(root_);
  return workers;
}

bool PassProtocol::needs(WorkerId worker) const {
  return running() &&
         (peers_.contains(worker) || participants_.contains(worker) || worker == root_);
}

// One MARK for each worker that sent some of these links.
void PassProtocol::send_marks(const std::vector<LinkId>& reached, PassEffects& effects) {
  std::map<WorkerId, wire::Mark> marks;
  for (const LinkId& link : reached) marks[link.sender].links.push_back(link.counter);
  for (auto& [to, mark] : marks) {
    peers_.insert(to);
    ++deficit_;
    ++deficits_[to];
    effects.marks.emplace_back(to, std::move(mark));
  }
}

// Called after every change: adds what the new state allows.
void PassProtocol::advance(PassEffects& effects) {
  if (!running() || effects.fail) return;
  if (fast_ && quiet_) {
    for (const auto& [to, count] : owed_) effects.acks.push_back({to, {count, {}}});
    owed_.clear();
  }
  if (phase_ == Phase::marking) disengage(effects);
  if (effects.fail) return;
  if (phase_ != Phase::marking_closed || writing_ != 0 || !(fast_ ? quiet_ : resolved_)) return;
  if (!is_root()) {
    phase_ = Phase::ended;
    effects.done = unused_links();
    return;
  }
  if (!not_done_.empty()) return;
  if (unused_.unused_links != 0) {
    effects.fail = unused_error();
    return;
  }
  phase_ = Phase::ended;
  effects.succeed = true;
}

// Dijkstra-Scholten: everything this worker caused has ended when no message it sent is
// unacknowledged (and, in fast mode, its own strand is quiet). Then it tells the worker that caused
// it; at the root, everything has ended.
void PassProtocol::disengage(PassEffects& effects) {
  if (deficit_ != 0 || (fast_ && !quiet_)) return;
  if (is_root()) {
    if (begun_) close_marking(effects);
  } else if (parent_) {
    wire::Ack ack{1, {participants_.begin(), participants_.end()}};
    ack.participants.push_back(self_);
    effects.acks.emplace_back(*parent_, std::move(ack));
    parent_.reset();
  }
}

// It is known on all workers what the loss uses: what is unmarked here is dead.
void PassProtocol::close_marking(PassEffects& effects) {
  if (!fast_) {
    for (const std::uint32_t send : graph_->sends()) {
      if (graph_->marked(send)) continue;
      if (delivered_[send]) {  // the marking stays open: nothing can end before the pass fails
        effects.kill.clear();
        effects.fail = protocol_error("worker " + std::to_string(graph_->receiver(send).value()) +
                                      " sent a gradient for a call that the loss does not use");
        return;
      }
      effects.kill.push_back(send);
    }
    posted_ += effects.kill.size();
    if (!effects.kill.empty()) quiet_ = false;
  }
  phase_ = Phase::marking_closed;
  if (!is_root()) return;
  unused_ = unused_links();
  participants_.erase(self_);
  not_done_ = participants_;
  effects.close_marking.assign(participants_.begin(), participants_.end());
}

// Fast mode: the links of this worker that got no gradient.
wire::Done PassProtocol::unused_links() const {
  wire::Done done;
  if (!fast_) return done;
  for (const std::uint32_t send : graph_->sends()) {
    if (delivered_[send]) continue;
    ++done.unused_links;
    const std::string& call = graph_->call(send);
    const bool named = std::find(done.unused_calls.begin(), done.unused_calls.end(), call) !=
                       done.unused_calls.end();
    if (!named && done.unused_calls.size() < kNamedCalls) done.unused_calls.push_back(call);
  }
  return done;
}

Error PassProtocol::unused_error() const {
  std::vector<std::string> calls = unused_.unused_calls;
  std::sort(calls.begin(), calls.end());
  calls.erase(std::unique(calls.begin(), calls.end()), calls.end());
  const bool one = calls.size() == 1;
  const bool more = calls.size() > kNamedCalls;
  if (more) calls.resize(kNamedCalls);
  return Error(ErrorCode::invalid_argument,
               (one ? "result of call " : "results of calls ") + base::join_names(calls) +
                   (more ? " and others" : "") + (one ? " was" : " were") +
                   " not used by the loss; use exact mode");
}

}  // namespace stitch::dist_autograd
