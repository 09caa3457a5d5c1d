#include "stitch/rref/lifetime/lifetime.h"

#include <algorithm>
#include <string>

namespace stitch::rref {

RRefId Lifetime::add_object(std::shared_ptr<void> object) {
  base::MutexLock lock(mutex_);
  if (leaving_) throw *leaving_;
  const RRefId id{self_, self_, next_k_[self_]++};
  owners_.add(id, std::move(object));
  return id;
}

RRefId Lifetime::begin_create(const WorkerLife& owner) {
  base::MutexLock lock(mutex_);
  if (leaving_) throw *leaving_;
  const auto gone = gone_.find(owner);
  if (gone != gone_.end()) throw gone->second;
  const RRefId id{owner, self_, next_k_[owner]++};
  holders_.begin_create(id);
  return id;
}

Lifetime::Todo Lifetime::answered(const RRefId& id, const std::optional<Error>& failure) {
  base::MutexLock lock(mutex_);
  Effects effects;
  holders_.answered(id, failure, effects);
  return pack(std::move(effects));
}

Lifetime::Todo Lifetime::never_asked(const RRefId& id, const Error& why) {
  base::MutexLock lock(mutex_);
  Effects effects;
  holders_.never_asked(id, why, effects);
  return pack(std::move(effects));
}

bool Lifetime::create(const RRefId& id, const WorkerLife& creator) {
  if (id.owner != self_ || id.creator != creator) {
    throw Error(ErrorCode::protocol, to_string(id) + " is not for worker " +
                                         std::to_string(creator.id) + " to ask for here");
  }
  base::MutexLock lock(mutex_);
  if (leaving_) throw *leaving_;
  const auto gone = gone_.find(creator);
  if (gone != gone_.end()) throw gone->second;
  return owners_.create(id, creator);
}

Lifetime::Todo Lifetime::resolve(const RRefId& id, std::shared_ptr<void> object,
                                 const std::optional<Error>& failure) {
  base::MutexLock lock(mutex_);
  Effects effects;
  owners_.resolve(id, std::move(object), failure, effects);
  return pack(std::move(effects));
}

bool Lifetime::hears_of_creation(const RRefId& id) const {
  base::MutexLock lock(mutex_);
  return leaving_ || id.owner == self_ || holders_.hears_of_creation(id);
}

Lifetime::Todo Lifetime::when_created(const RRefId& id, Waiter waiter) {
  base::MutexLock lock(mutex_);
  Effects effects;
  if (leaving_) {
    effects.run.push_back({std::move(waiter), nullptr, leaving_});
  } else if (owned_here(id)) {
    owners_.when_resolved(id, std::move(waiter), effects);
  } else {
    holders_.when_answered(id, std::move(waiter), effects);
  }
  return pack(std::move(effects));
}

void Lifetime::add_local(const RRefId& id) {
  base::MutexLock lock(mutex_);
  if (leaving_) return;
  if (owned_here(id)) {
    (void)owners_.add_local(id);
  } else {
    holders_.add_local(id);
  }
}

Lifetime::Todo Lifetime::drop_local(const RRefId& id) {
  base::MutexLock lock(mutex_);
  Effects effects;
  if (leaving_) return {};
  if (owned_here(id)) {
    owners_.drop_local(id, effects);
  } else {
    holders_.drop_local(id, effects);
  }
  return pack(std::move(effects));
}

Lifetime::Status Lifetime::status(const RRefId& id) const {
  base::MutexLock lock(mutex_);
  if (leaving_) return {false, false, leaving_};
  if (owned_here(id)) return {true, true, std::nullopt};
  const auto hold = holders_.status(id);
  if (!hold) return {false, false, Error(ErrorCode::internal, to_string(id) + " is not held here")};
  if (hold->state == HolderTable::State::lost) return {false, false, hold->error};
  return {false, hold->created || hold->state == HolderTable::State::registered, std::nullopt};
}

std::optional<OwnerTable::Status> Lifetime::owned(const RRefId& id) const {
  base::MutexLock lock(mutex_);
  return owners_.status(id);
}

std::vector<RRefId> Lifetime::owned_ids() const {
  base::MutexLock lock(mutex_);
  return owners_.ids();
}

Carried Lifetime::pin(const RRefId& id, const WorkerLife& receiver) {
  base::MutexLock lock(mutex_);
  Carried carried{.id = id};
  if (leaving_) throw *leaving_;
  if (receiver == self_) {  // counters only: the message is one more local reference
    if (owned_here(id)) {
      (void)owners_.add_local(id);
    } else {
      holders_.add_local(id);
    }
    return carried;
  }
  if (owned_here(id)) {
    owners_.pin(id);
    carried.created = owners_.status(id)->value != OwnerTable::Value::pending;
  } else {
    if (!holders_.pin(id)) {
      carried.lost = true;
      return carried;
    }
    carried.created = holders_.status(id)->created;
  }
  Link& link = links_[receiver];
  carried.pinned = true;
  carried.token = link.next_token++;
  link.tokens.emplace(carried.token, id);
  return carried;
}

Lifetime::Todo Lifetime::unpin(const Carried& carried, const WorkerLife& receiver) {
  base::MutexLock lock(mutex_);
  Effects effects;
  if (receiver == self_) {
    if (leaving_) return {};
    if (owned_here(carried.id)) {
      owners_.drop_local(carried.id, effects);
    } else {
      holders_.drop_local(carried.id, effects);
    }
  } else if (carried.pinned && links_[receiver].tokens.erase(carried.token) > 0) {
    drop_pin(carried.id, effects);
  }
  return pack(std::move(effects));
}

void Lifetime::set_world(std::function<bool(const WorkerLife&)> in_world) {
  base::MutexLock lock(mutex_);
  in_world_ = std::move(in_world);
}

bool Lifetime::owned_here(const RRefId& id) const {
  return owners_.contains(id) && !holders_.contains(id);
}

void Lifetime::check(const RRefId& id) const {
  base::MutexLock lock(mutex_);
  check_locked(id);
}

void Lifetime::check_locked(const RRefId& id) const {
  if (owners_.contains(id) || holders_.contains(id)) return;
  if (id.creator == self_) {
    const auto issued = next_k_.find(id.owner);
    if (issued == next_k_.end() || id.k >= issued->second) {
      throw Error(ErrorCode::protocol,
                  to_string(id) + " was never created by worker " + std::to_string(self_.id));
    }
  } else if (id.owner == self_ && in_world_ && !gone_.contains(id.creator) &&
             !in_world_(id.creator)) {
    throw Error(ErrorCode::protocol,
                to_string(id) + " names a creator, worker " + std::to_string(id.creator.id) +
                    " epoch " + std::to_string(id.creator.epoch) + ", that is not in this world");
  }
}

Lifetime::Todo Lifetime::receive(const Carried& carried, const WorkerLife& sender,
                                 const std::optional<Error>& lost_there) {
  base::MutexLock lock(mutex_);
  Effects effects;
  if (sender == self_) return {};  // pin() counted it
  if (leaving_) {                  // nothing here will use it
    if (carried.pinned) effects.ops.push_back({sender, LedgerOp::make_settle(carried.token)});
    return pack(std::move(effects));
  }
  if (!holders_.contains(carried.id) && (owners_.contains(carried.id) || !carried.lost) &&
      owners_.add_local(carried.id)) {
    if (carried.pinned) effects.ops.push_back({sender, LedgerOp::make_settle(carried.token)});
    return pack(std::move(effects));
  }
  std::optional<Error> lost = why_lost(carried.id);
  if (!lost && carried.lost)
    lost = lost_there.value_or(Error(ErrorCode::disconnected,
                                     to_string(carried.id) + " was lost before it was sent here"));
  bool still_registered = false;
  if (!holders_.contains(carried.id) && !lost) {
    const auto link = links_.find(carried.id.owner);
    still_registered = link != links_.end() && link->second.ledger.withdraw_drop(carried.id);
  }
  holders_.receive(carried.id, {sender, carried.token, carried.pinned, carried.created},
                   still_registered, lost, effects);
  return pack(std::move(effects));
}

Lifetime::Todo Lifetime::message_done(const RRefId& id, const WorkerLife& sender) {
  base::MutexLock lock(mutex_);
  Effects effects;
  if (leaving_) return {};
  if (owned_here(id)) {
    owners_.drop_local(id, effects);
  } else if (sender == self_) {
    holders_.drop_local(id, effects);
  } else {
    holders_.message_done(id, effects);
  }
  return pack(std::move(effects));
}

Lifetime::Todo Lifetime::register_kept() {
  base::MutexLock lock(mutex_);
  Effects effects;
  holders_.register_kept(effects);
  return pack(std::move(effects));
}

bool Lifetime::encode_ledger(const WorkerLife& peer, base::Bytes& out) {
  base::MutexLock lock(mutex_);
  const auto link = links_.find(peer);
  return link != links_.end() && link->second.ledger.encode(out);
}

Lifetime::Todo Lifetime::accept_ledger(const WorkerLife& peer, std::span<const std::byte> frame) {
  base::MutexLock lock(mutex_);
  Effects effects;
  std::optional<Error> broken;
  if (gone_.contains(peer)) return {};
  Link& link = links_[peer];
  try {
    // Applied under the same lock that encode_ledger() takes: no frame can acknowledge what is not
    // applied (G3).
    Ledger::Arrived arrived = link.ledger.accept(frame);
    for (const LedgerOp& op : arrived.acknowledged) {
      if (op.kind == LedgerOp::Kind::reg) holders_.registered(op.id, effects);
    }
    for (const LedgerOp& op : arrived.ops) apply(op, peer, link, effects);
  } catch (const Error& error) {
    broken = error;
  }
  const Urgency urgency = link.ledger.urgency();
  Todo todo = pack(std::move(effects));
  if (urgency != Urgency::none) todo.flush.emplace_back(peer, urgency);
  todo.broken = broken;
  return todo;
}

Lifetime::Todo Lifetime::tick() {
  base::MutexLock lock(mutex_);
  Effects effects;
  holders_.tick(effects);
  Todo todo = pack(std::move(effects));
  for (auto& [peer, link] : links_) {
    if (link.ledger.tick()) todo.flush.emplace_back(peer, Urgency::soon);
  }
  return todo;
}

Lifetime::Todo Lifetime::reconnected(const WorkerLife& peer) {
  base::MutexLock lock(mutex_);
  Todo todo;
  const auto link = links_.find(peer);
  if (link == links_.end()) return todo;
  link->second.ledger.resend();
  const Urgency urgency = link->second.ledger.urgency();
  if (urgency != Urgency::none) todo.flush.emplace_back(peer, urgency);
  return todo;
}

Lifetime::Todo Lifetime::peer_lost(const WorkerLife& peer, const Error& why) {
  base::MutexLock lock(mutex_);
  Effects effects;
  if (!gone_.emplace(peer, why).second) return {};
  // Its word is not waited for, and nothing more is told to it. Pins towards it stay: what it
  // borrowed it may have lent on.
  const auto link = links_.find(peer);
  if (link != links_.end()) link->second.ledger = Ledger();
  holders_.owner_lost(peer, why, effects);
  owners_.creator_lost(peer, why, effects);
  return pack(std::move(effects));
}

Lifetime::Todo Lifetime::leave(const Error& why) {
  base::MutexLock lock(mutex_);
  Effects effects;
  if (leaving_) return {};
  leaving_ = why;
  holders_.abandon(effects);
  owners_.abandon(effects);
  return pack(std::move(effects));
}

bool Lifetime::quiet() const {
  base::MutexLock lock(mutex_);
  if (holders_.size() > 0) return false;
  return std::all_of(links_.begin(), links_.end(),
                     [](const auto& link) { return link.second.ledger.unacknowledged() == 0; });
}

Lifetime::Todo Lifetime::close() {
  base::MutexLock lock(mutex_);
  Effects effects;
  if (!leaving_) leaving_ = Error(ErrorCode::shutting_down, "this worker has shut down");
  owners_.clear(*leaving_, effects);
  for (auto& [peer, link] : links_) gone_.emplace(peer, *leaving_);
  Todo todo = pack(std::move(effects));
  links_.clear();
  return todo;
}

Lifetime::Counts Lifetime::counts() const {
  base::MutexLock lock(mutex_);
  Counts counts;
  counts.owned = owners_.counts();
  counts.held = holders_.counts();
  counts.entries = owners_.size();
  counts.holds = holders_.size();
  for (const auto& [peer, link] : links_) {
    counts.tokens += link.tokens.size();
    counts.ledger_unsent += link.ledger.unsent();
    counts.ledger_unacknowledged += link.ledger.unacknowledged();
  }
  return counts;
}

Lifetime::Todo Lifetime::pack(Effects effects) {
  Todo todo;
  std::vector<WorkerLife> touched;
  for (const Effects::Op& op : effects.ops) {
    if (gone_.contains(op.to)) continue;
    links_[op.to].ledger.push(op.op);
    if (std::find(touched.begin(), touched.end(), op.to) == touched.end()) touched.push_back(op.to);
  }
  for (const WorkerLife& peer : touched)
    todo.flush.emplace_back(peer, links_[peer].ledger.urgency());
  todo.destroy = std::move(effects.destroy);
  todo.run = std::move(effects.run);
  todo.kept = effects.kept;
  return todo;
}

void Lifetime::drop_pin(const RRefId& id, Effects& effects) {
  if (owners_.contains(id)) {
    owners_.unpin(id, effects);
  } else {
    holders_.unpin(id, effects);
  }
}

void Lifetime::apply(const LedgerOp& op, const WorkerLife& peer, Link& link, Effects& effects) {
  if (op.kind == LedgerOp::Kind::settle) {
    if (op.first_token + op.tokens > link.next_token) {
      throw Error(ErrorCode::protocol, "reference ledger: settles token " +
                                           std::to_string(op.first_token + op.tokens - 1) + ", " +
                                           std::to_string(link.next_token) + " were sent");
    }
    auto at = link.tokens.lower_bound(op.first_token);
    while (at != link.tokens.end() && at->first - op.first_token < op.tokens) {
      drop_pin(at->second, effects);
      at = link.tokens.erase(at);
    }
    return;
  }
  if (op.id.owner != self_) {
    throw Error(ErrorCode::protocol, "reference ledger: names " + to_string(op.id) + " to worker " +
                                         std::to_string(self_.id) + " epoch " +
                                         std::to_string(self_.epoch));
  }
  check_locked(op.id);
  if (op.kind == LedgerOp::Kind::reg) {
    owners_.add_holder(op.id, peer);
  } else {
    owners_.drop_holder(op.id, peer, effects);
  }
}

std::optional<Error> Lifetime::why_lost(const RRefId& id) const {
  const auto gone = gone_.find(id.owner);
  if (gone != gone_.end()) return gone->second;
  if (id.owner.id != self_.id) return std::nullopt;
  if (id.owner.epoch == self_.epoch)
    return Error(ErrorCode::disconnected, to_string(id) + " is gone");
  return Error(ErrorCode::disconnected, "worker " + std::to_string(id.owner.id) + " epoch " +
                                            std::to_string(id.owner.epoch) +
                                            " is gone; it is now epoch " +
                                            std::to_string(self_.epoch));
}

}  // namespace stitch::rref
