#include "stitch/dist_autograd/protocol/pass_protocol.h"

#include <utility>

namespace stitch::dist_autograd {

namespace {

Error protocol_error(const std::string& text) { return Error(ErrorCode::protocol, text); }

}  // namespace

void PassProtocol::set_graph(std::unique_ptr<PassGraph> graph) {
  graph_ = std::move(graph);
  delivered_.assign(graph_->size(), false);
  missing_ = graph_->sends().size();
}

PassEffects PassProtocol::begin() {
  PassEffects effects;
  if (!running()) return effects;
  begun_ = true;
  advance(effects);
  return effects;
}

// ---- messages

PassEffects PassProtocol::on_mark(const WorkerInfo& from, const wire::Mark& mark) {
  PassEffects effects;
  if (!running()) return effects;
  std::vector<std::uint32_t> sends;
  sends.reserve(mark.links.size());
  for (const std::uint64_t link : mark.links) {
    sends.push_back(graph_->find(link));
    if (sends.back() == PassGraph::kNone) {
      throw protocol_error(
          "a call result used by the loss is unknown here; is forward still running?");
    }
    if (graph_->receiver(sends.back()) != from.id) {
      throw protocol_error(stitch::to_string(from) + " marked " + graph_->call(sends.back()) +
                           ", which was sent to another worker");
    }
  }
  if (phase_ == Phase::gradients && (is_root() || !idle()))
    throw protocol_error(stitch::to_string(from) + " sent a MARK while gradients were in flight");
  if (phase_ == Phase::closed)
    throw protocol_error(stitch::to_string(from) + " sent a MARK after the marking had ended");
  effects.new_peer = peers_.insert(from.id).second;
  phase_ = Phase::marking;
  std::vector<LinkId> reached;
  for (const std::uint32_t send : sends) graph_->mark(send, reached);
  engage(from.id, effects);
  send_marks(reached, effects);
  advance(effects);
  return effects;
}

PassEffects PassProtocol::on_ack(const WorkerInfo& from, const wire::Ack& ack) {
  PassEffects effects;
  if (!running()) return effects;
  take_ack(from, ack);
  advance(effects);
  return effects;
}

PassEffects PassProtocol::on_quiet(const WorkerInfo& from) {
  PassEffects effects;
  if (!running()) return effects;
  if (from.id != root_ || is_root())
    throw protocol_error(stitch::to_string(from) + " ended the gradients of another worker's pass");
  if (heard_quiet_ || phase_ == Phase::closed)
    throw protocol_error(stitch::to_string(from) + " sent QUIET in a pass that does not expect it");
  if (phase_ == Phase::gradients && !idle())
    throw protocol_error(stitch::to_string(from) + " sent QUIET while gradients were in flight");
  heard_quiet_ = true;
  peers_.insert(from.id);
  if (missing_ == 0) {
    phase_ = Phase::closed;  // DONE is the answer
  } else {
    phase_ = Phase::marking;
    engage(from.id, effects);
    mark_used(effects);
  }
  advance(effects);
  return effects;
}

PassEffects PassProtocol::on_close_marking(const WorkerInfo& from) {
  PassEffects effects;
  if (!running()) return effects;
  if (from.id != root_)
    throw protocol_error(stitch::to_string(from) + " closed the marking of another worker's pass");
  if (phase_ == Phase::gradients)
    throw protocol_error(stitch::to_string(from) + " closed a marking that had not begun");
  if (phase_ != Phase::marking) return effects;
  peers_.insert(from.id);
  close_marking(effects);
  advance(effects);
  return effects;
}

PassEffects PassProtocol::on_done(const WorkerInfo& from) {
  PassEffects effects;
  if (!running()) return effects;
  // During marking it is the answer to QUIET of a worker that needs no marks.
  std::uint64_t& owed_by = deficits_[from.id];
  const bool answers = phase_ == Phase::marking && owed_by != 0;
  if ((phase_ != Phase::closed && !answers) || not_done_.erase(from.id) == 0) {
    throw protocol_error(stitch::to_string(from) +
                         " is done with a pass that does not wait for it");
  }
  if (answers) {
    --owed_by;
    --deficit_;
  }
  advance(effects);
  return effects;
}

PassEffects PassProtocol::on_gradients(const WorkerInfo& from, const wire::Ack& ack,
                                       std::span<const std::uint32_t> sends) {
  PassEffects effects;
  if (!running()) return effects;
  effects.new_peer = peers_.insert(from.id).second;
  const bool ends_engagement = !ack.participants.empty();
  take_ack(from, ack);
  if (phase_ == Phase::gradients && !ends_engagement) {
    if (is_root() || parent_) {
      ++owed_[from.id];
    } else {
      parent_ = from.id;
    }
  }
  for (const std::uint32_t send : sends) {
    if (delivered_[send])
      throw protocol_error(stitch::to_string(from) + " sent the gradients of a call twice");
    if (phase_ != Phase::gradients && !graph_->marked(send)) {
      throw protocol_error(stitch::to_string(from) +
                           " sent a gradient for a call that the loss does not use");
    }
    delivered_[send] = true;
    --missing_;
    ++posted_;
    quiet_ = false;
  }
  effects.deliver = true;
  advance(effects);
  return effects;
}

// ---- the strand

std::optional<wire::Ack> PassProtocol::sending_gradients(WorkerId to,
                                                         std::optional<std::uint64_t> last) {
  if (!running()) return std::nullopt;
  peers_.insert(to);
  ++writing_;
  if (phase_ != Phase::gradients) return wire::Ack{};
  // The parent waits for this worker's answer, so it is engaged when they arrive together: these
  // GRADIENTS need no acknowledgement.
  if (parent_ == to && deficit_ == 0 && last == posted_) return answer_parent();
  ++deficit_;
  ++deficits_[to];
  const auto owed = owed_.extract(to);
  return wire::Ack{owed ? owed.mapped() : 0, {}};
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

// ---- failures

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

// ---- marking

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

void PassProtocol::mark_used(PassEffects& effects) {
  std::vector<LinkId> reached;
  graph_->mark_used(delivered_, reached);
  send_marks(reached, effects);
}

// ---- Dijkstra and Scholten

// A MARK or QUIET has come.
void PassProtocol::engage(WorkerId by, PassEffects& effects) {
  if (is_root() || parent_) {
    effects.acks.push_back({by, {1, {}}});
  } else {
    parent_ = by;
  }
}

void PassProtocol::take_ack(const WorkerInfo& from, const wire::Ack& ack) {
  if (!ack.participants.empty() && ack.count == 0)
    throw protocol_error(stitch::to_string(from) + " named participants, but acknowledged nothing");
  std::uint64_t& owed_by = deficits_[from.id];
  if (ack.count > owed_by) {
    throw protocol_error(stitch::to_string(from) + " acknowledged more messages than it was sent");
  }
  owed_by -= ack.count;
  deficit_ -= ack.count;
  below_missing_ += ack.missing;
  for (const WorkerId worker : ack.participants) {
    const bool added = participants_.insert(worker).second;
    if (added && is_root() && phase_ == Phase::marking && worker != self_) not_done_.insert(worker);
  }
}

// Called after every change: adds what the new state allows.
void PassProtocol::advance(PassEffects& effects) {
  if (!running()) return;
  if (phase_ == Phase::gradients && quiet_) acknowledge(effects);
  if (phase_ != Phase::closed) disengage(effects);
  if (phase_ != Phase::closed || writing_ != 0) return;
  if (!resolved_) return;
  if (is_root()) {
    if (!not_done_.empty()) return;
    effects.succeed = true;
  } else {
    effects.done = true;
  }
  phase_ = Phase::ended;
}

// GRADIENTS that could not be acknowledged by others the other way. The parent's wait for the
// answer to it, which it waits for anyway.
void PassProtocol::acknowledge(PassEffects& effects) {
  for (auto owed = owed_.begin(); owed != owed_.end();) {
    if (parent_ == owed->first) {
      ++owed;
      continue;
    }
    effects.acks.push_back({owed->first, {owed->second, {}}});
    owed = owed_.erase(owed);
  }
}

// Everything this worker caused has ended when no message it sent is unacknowledged and, while
// gradients flow, its own strand is quiet. Then it tells the worker that caused it; at the root,
// everything has ended.
void PassProtocol::disengage(PassEffects& effects) {
  if (deficit_ != 0 || (phase_ == Phase::gradients && !quiet_)) return;
  if (parent_) {
    const WorkerId to = *parent_;
    effects.acks.emplace_back(to, answer_parent());
  }
  if (!is_root() || !begun_) return;
  if (phase_ == Phase::gradients) end_gradients(effects);
  if (phase_ == Phase::marking && deficit_ == 0) close_marking(effects);
}

wire::Ack PassProtocol::answer_parent() {
  const auto owed = owed_.extract(*parent_);
  wire::Ack ack{1 + (owed ? owed.mapped() : 0), {participants_.begin(), participants_.end()}};
  ack.participants.push_back(self_);
  ack.missing =
      std::exchange(below_missing_, 0) + missing_ - std::exchange(told_missing_, missing_);
  parent_.reset();
  return ack;
}

// Root: no gradient is in flight, and all strands are quiet.
void PassProtocol::end_gradients(PassEffects& effects) {
  participants_.erase(self_);
  not_done_ = participants_;
  effects.quiet.assign(participants_.begin(), participants_.end());
  // The differences of all workers add up to what each of them misses now.
  effects.settled = below_missing_ + missing_ == 0;
  phase_ = Phase::marking;
  deficit_ += participants_.size();
  for (const WorkerId to : participants_) ++deficits_[to];
  if (missing_ != 0) mark_used(effects);
}

// It is known on all workers what the loss uses: what is unmarked here is dead.
void PassProtocol::close_marking(PassEffects& effects) {
  for (const std::uint32_t send : graph_->sends()) {
    if (!delivered_[send] && !graph_->marked(send)) effects.kill.push_back(send);
  }
  posted_ += effects.kill.size();
  if (!effects.kill.empty()) quiet_ = false;
  phase_ = Phase::closed;
  if (is_root()) effects.close_marking.assign(not_done_.begin(), not_done_.end());
}

}  // namespace stitch::dist_autograd
