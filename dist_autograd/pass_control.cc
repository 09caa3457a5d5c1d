#include <algorithm>

#include "stitch/dist_autograd/engine.h"
#include "stitch/dist_autograd/pass.h"

// The decisions of a pass: what each message means and when a part of the protocol has ended. See
// PROTOCOL.md.
namespace stitch::dist_autograd {

namespace {
constexpr std::size_t kNamedCalls = 8;
}

void Pass::begin(std::vector<at::Tensor> gradients, Promise<void> done,
                 rpc::Clock::time_point deadline) {
  done.on_cancel([weak = weak_from_this()] {
    if (const auto pass = weak.lock())
      pass->abort(Error(ErrorCode::cancelled, "backward was cancelled"));
  });
  std::optional<Error> over;
  {
    base::MutexLock lock(mutex_);
    begun_ = rpc::Clock::now();
    if (!running()) over = error_;
    if (!over) promise_ = done;
    if (!over && deadline != rpc::Clock::time_point::max()) {
      timer_ = agent_->loop().call_at(deadline, [weak = weak_from_this()] {
        if (const auto pass = weak.lock()) pass->expire();
      });
    }
  }
  if (over) {
    done.set_error(*over);
    strand_->start();
    return;
  }
  guard([&] {
    for (std::size_t i = 0; i < gradients.size(); ++i) strand_->seed(i, std::move(gradients[i]));
    strand_->start();
    Actions actions;
    {
      base::MutexLock lock(mutex_);
      if (!running()) return;
      MarksByPeer marks;
      if (!settings_.fast) {
        for (const Plan::Target& root : plan_->roots()) spread(root.node, marks);
      }
      send_marks(std::move(marks), actions);
      begun_marking_ = true;
      advance(actions);
    }
    perform(std::move(actions));
  });
  strand_->start();  // also after an error: a pass that was aborted ends on its strand
}

void Pass::on_mark(const WorkerInfo& from, const wire::Mark& mark) {
  guard([&] {
    bool entered = false;
    Actions actions;
    {
      base::MutexLock lock(mutex_);
      if (!running()) return;
      entered = peers_.insert(from.id).second;
      MarksByPeer marks;
      for (const std::uint64_t counter : mark.links) {
        const std::uint32_t index = plan_->find({agent_->self().id, counter});
        if (index == Plan::kNone) {
          throw Error(ErrorCode::protocol,
                      "a call result used by the loss is unknown here; is forward still running?");
        }
        if (plan_->send(index).receiver().id != from.id) {
          throw Error(ErrorCode::protocol, stitch::to_string(from) + " marked " +
                                               plan_->send(index).call() +
                                               ", which was sent to another worker");
        }
        spread(index, marks);
      }
      if (root() || parent_) {
        actions.acks.push_back({from.id, {1, {}}});
      } else {
        parent_ = from.id;
      }
      send_marks(std::move(marks), actions);
      advance(actions);
    }
    perform(std::move(actions));
    if (entered) {
      check_lost(from.id);
      check_lost(id_.root);  // nobody else may ever say that this pass has ended
    }
  });
}

void Pass::on_ack(const WorkerInfo& from, const wire::Ack& ack) {
  guard([&] {
    for (const WorkerId id : ack.participants)
      static_cast<void>(agent_->peers().find(id));  // throws for one that does not exist
    Actions actions;
    {
      base::MutexLock lock(mutex_);
      if (!running()) return;
      auto& owed_by = deficits_[from.id];
      if (ack.count > owed_by)
        throw Error(ErrorCode::protocol,
                    stitch::to_string(from) + " acknowledged more messages than it was sent");
      owed_by -= ack.count;
      deficit_ -= ack.count;
      participants_.insert(ack.participants.begin(), ack.participants.end());
      advance(actions);
    }
    perform(std::move(actions));
  });
}

void Pass::on_settle(const WorkerInfo& from) {
  guard([&] {
    Actions actions;
    {
      base::MutexLock lock(mutex_);
      if (!running()) return;
      if (from.id != id_.root)
        throw Error(ErrorCode::protocol,
                    stitch::to_string(from) + " settled a pass of another worker");
      if (phase_ != Phase::open) return;
      peers_.insert(from.id);
      settle(actions);
      advance(actions);
    }
    perform(std::move(actions));
  });
}

void Pass::on_done(const WorkerInfo& from, const wire::Done& done) {
  guard([&] {
    Actions actions;
    {
      base::MutexLock lock(mutex_);
      if (!running()) return;
      if (not_done_.erase(from.id) == 0) {
        throw Error(ErrorCode::protocol,
                    stitch::to_string(from) + " is done with a pass that does not wait for it");
      }
      unused_.unused_links += done.unused_links;
      unused_.unused_calls.insert(unused_.unused_calls.end(), done.unused_calls.begin(),
                                  done.unused_calls.end());
      advance(actions);
    }
    perform(std::move(actions));
  });
}

void Pass::on_gradients(const WorkerInfo& from, std::vector<wire::GradientEntry> entries,
                        std::vector<at::Tensor> tensors) {
  guard([&] {
    std::vector<std::pair<std::uint32_t, variable_list>> deliveries;
    std::size_t next = 0;
    for (const wire::GradientEntry& entry : entries) {
      const std::uint32_t index = plan_->find({agent_->self().id, entry.link});
      if (index == Plan::kNone)
        throw Error(ErrorCode::protocol,
                    "a gradient came for a call that is unknown here; is forward still running?");
      deliveries.emplace_back(index, unpack(from, entry, index, tensors, next));
    }
    bool entered = false;
    Actions actions;
    {
      base::MutexLock lock(mutex_);
      if (!running()) return;
      entered = peers_.insert(from.id).second;
      if (settings_.fast) {
        if (root() || parent_) {
          ++owed_[from.id];
        } else {
          parent_ = from.id;
        }
      }
      for (const auto& [index, gradients] : deliveries) {
        if (delivered_[index]) {
          throw Error(ErrorCode::protocol,
                      stitch::to_string(from) + " sent the gradients of a call twice");
        }
        if (phase_ == Phase::settled && marks_ && !marks_->marked(index)) {
          throw Error(
              ErrorCode::protocol,
              stitch::to_string(from) + " sent a gradient for a call that the loss does not use");
        }
        delivered_[index] = true;
        ++posted_;
        quiet_ = false;
      }
      advance(actions);
    }
    perform(std::move(actions));
    for (auto& [index, gradients] : deliveries) strand_->deliver(index, std::move(gradients));
    if (entered) {
      check_lost(from.id);
      check_lost(id_.root);
    }
  });
}

// Marks what is reachable from `source` and notes which links that uses.
void Pass::spread(std::uint32_t source, MarksByPeer& marks) {
  std::vector<std::uint32_t> recvs;
  marks_->spread(source, recvs);
  for (const std::uint32_t index : recvs) {
    const RecvNode& node = plan_->recv(index);
    require_own(node);
    marks[node.sender().id].links.push_back(node.link().counter);
  }
}

void Pass::send_marks(MarksByPeer marks, Actions& actions) {
  for (auto& [to, mark] : marks) {
    peers_.insert(to);
    ++deficit_;
    ++deficits_[to];
    actions.marks.emplace_back(to, std::move(mark));
  }
}

// Called after every change: does what the new state allows.
void Pass::advance(Actions& actions) {
  if (!running()) return;
  if (settings_.fast && quiet_) {
    for (const auto& [to, count] : owed_) actions.acks.push_back({to, {count, {}}});
    owed_.clear();
  }
  if (phase_ == Phase::open) disengage(actions);
  if (phase_ != Phase::settled || writing_ != 0 || !(settings_.fast ? quiet_ : resolved_)) return;
  if (!root()) {
    phase_ = Phase::ended;
    actions.done = unused_links();
    return;
  }
  if (!not_done_.empty()) return;
  if (unused_.unused_links != 0) {
    actions.error = unused_error();
    return;
  }
  phase_ = Phase::ended;
  actions.succeed = true;
}

// Dijkstra-Scholten: everything this worker caused has ended when nothing of it is unacknowledged
// (and, in fast mode, its own strand is quiet). Then whoever caused it hears of it; at the root,
// everything has ended.
void Pass::disengage(Actions& actions) {
  if (deficit_ != 0 || (settings_.fast && !quiet_)) return;
  if (root()) {
    if (begun_marking_) settle(actions);
  } else if (parent_) {
    wire::Ack ack{1, {participants_.begin(), participants_.end()}};
    ack.participants.push_back(agent_->self().id);
    actions.acks.emplace_back(*parent_, std::move(ack));
    parent_.reset();
  }
}

// It is known everywhere what the loss uses: what is unmarked here is dead.
void Pass::settle(Actions& actions) {
  phase_ = Phase::settled;
  if (!settings_.fast) {
    for (const std::uint32_t send : plan_->sends()) {
      if (!marks_->marked(send)) actions.kill.push_back(send);
    }
    posted_ += actions.kill.size();
    if (!actions.kill.empty()) quiet_ = false;
  }
  if (!root()) return;
  unused_ = unused_links();
  participants_.erase(agent_->self().id);
  not_done_ = participants_;
  actions.settle.assign(participants_.begin(), participants_.end());
}

// Fast mode: the links of this worker that got no gradient.
wire::Done Pass::unused_links() const {
  wire::Done done;
  if (!settings_.fast) return done;
  for (const std::uint32_t index : plan_->sends()) {
    if (delivered_[index]) continue;
    ++done.unused_links;
    const std::string& call = plan_->send(index).call();
    const bool named = std::find(done.unused_calls.begin(), done.unused_calls.end(), call) !=
                       done.unused_calls.end();
    if (!named && done.unused_calls.size() < kNamedCalls) done.unused_calls.push_back(call);
  }
  return done;
}

Error Pass::unused_error() const {
  std::vector<std::string> calls = unused_.unused_calls;
  std::sort(calls.begin(), calls.end());
  calls.erase(std::unique(calls.begin(), calls.end()), calls.end());
  std::string text = calls.size() == 1 ? "result of call " : "results of calls ";
  for (std::size_t i = 0; i < calls.size() && i < kNamedCalls; ++i)
    text += (i == 0 ? "" : ", ") + calls[i];
  if (calls.size() > kNamedCalls) text += " and others";
  return Error(ErrorCode::invalid_argument, text + (calls.size() == 1 ? " was" : " were") +
                                                " not used by the loss; use exact mode");
}

}  // namespace stitch::dist_autograd
