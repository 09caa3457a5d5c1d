#include "stitch/rref/lifetime/lifetime.h"

#include <new>
#include <string>

namespace stitch::rref {

RRefId Lifetime::add_object(std::shared_ptr<void> object, const std::string* made_by) {
  base::require_reserve();
  base::MutexLock lock(mutex_);
  if (leaving_) throw *leaving_;
  const RRefId id{self_, self_, next_k_[self_]++};
  owners_.add(id, std::move(object), made_by);
  return id;
}

RRefId Lifetime::begin_create(const WorkerLife& owner, const std::string* made_by) {
  base::require_reserve();
  base::MutexLock lock(mutex_);
  if (leaving_) throw *leaving_;
  const auto gone = gone_.find(owner);
  if (gone != gone_.end()) throw gone->second;
  const RRefId id{owner, self_, next_k_[owner]++};
  holders_.begin_create(id, made_by);
  return id;
}

Effects Lifetime::answered(const RRefId& id, const std::optional<Error>& failure) {
  base::MutexLock lock(mutex_);
  TableEffects effects;
  holders_.answered(id, failure, effects);
  return pack(std::move(effects));
}

Effects Lifetime::create_not_sent(const RRefId& id, const Error& why) {
  base::MutexLock lock(mutex_);
  TableEffects effects;
  holders_.create_not_sent(id, why, effects);
  return pack(std::move(effects));
}

bool Lifetime::create(const RRefId& id, const WorkerLife& creator, const std::string* made_by) {
  if (id.owner != self_ || id.creator != creator) {
    throw Error(ErrorCode::protocol, to_string(id) + " cannot be requested here by worker " +
                                         std::to_string(creator.id));
  }
  base::require_reserve();
  base::MutexLock lock(mutex_);
  if (leaving_) throw *leaving_;
  const auto gone = gone_.find(creator);
  if (gone != gone_.end()) throw gone->second;
  return owners_.create(id, creator, made_by);
}

Effects Lifetime::resolve(const RRefId& id, std::shared_ptr<void> object,
                          const std::optional<Error>& failure) {
  base::MutexLock lock(mutex_);
  TableEffects effects;
  owners_.resolve(id, std::move(object), failure, effects);
  return pack(std::move(effects));
}

bool Lifetime::tracks_creation(const RRefId& id) const {
  base::MutexLock lock(mutex_);
  return leaving_ || id.owner == self_ || holders_.tracks_creation(id);
}

Effects Lifetime::when_created(const RRefId& id, Waiter waiter) {
  base::require_reserve();
  base::MutexLock lock(mutex_);
  TableEffects effects;
  if (leaving_) {
    effects.run.push_back({std::move(waiter), nullptr, leaving_});
  } else if (owned_here(id)) {
    owners_.when_resolved(id, std::move(waiter), effects);
  } else {
    holders_.when_answered(id, std::move(waiter), effects);
  }
  return pack(std::move(effects));
}

Lifetime::Watch Lifetime::watch_creation(const RRefId& id, Waiter& waiter) {
  base::require_reserve();
  base::MutexLock lock(mutex_);
  Watch watch;
  TableEffects effects;
  if (leaving_) {
    watch.lost = leaving_;
  } else if (owned_here(id)) {
    owners_.when_resolved(id, std::move(waiter), effects);
    watch.tracked = true;
  } else if (auto hold = holders_.status(id); !hold) {
    watch.lost = Error(ErrorCode::internal, to_string(id) + " is not held here");
  } else if (hold->state == HolderTable::State::lost) {
    watch.lost = std::move(hold->error);
  } else if (holders_.tracks_creation(id)) {
    holders_.when_answered(id, std::move(waiter), effects);
    watch.tracked = true;
  }
  watch.effects = pack(std::move(effects));
  return watch;
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

Effects Lifetime::drop_local(const RRefId& id) {
  base::MutexLock lock(mutex_);
  TableEffects effects;
  if (leaving_) return {};
  if (owned_here(id)) {
    owners_.drop_local(id, effects);
  } else {
    holders_.drop_local(id, effects);
  }
  return pack(std::move(effects));
}

CarriedRef Lifetime::pin(const RRefId& id, const WorkerLife& receiver) {
  base::require_reserve();
  base::MutexLock lock(mutex_);
  CarriedRef carried{.id = id};
  if (leaving_) throw *leaving_;
  if (const auto gone = gone_.find(receiver); gone != gone_.end()) throw gone->second;
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
    carried.created = !owners_.pending(id);
  } else {
    if (!holders_.pin(id)) {
      carried.lost = true;
      return carried;
    }
    carried.created = holders_.created(id);
  }
  try {
    PeerState& peer = peers_[receiver];
    peer.tokens.emplace(peer.next_token, id);
    carried.pinned = true;
    carried.token = peer.next_token++;
  } catch (...) {
    TableEffects none;  // the caller's reference keeps the object
    drop_pin(id, none);
    throw;
  }
  return carried;
}

Effects Lifetime::unpin(const CarriedRef& carried, const WorkerLife& receiver) {
  base::MutexLock lock(mutex_);
  TableEffects effects;
  if (receiver == self_) {
    if (leaving_) return {};
    if (owned_here(carried.id)) {
      owners_.drop_local(carried.id, effects);
    } else {
      holders_.drop_local(carried.id, effects);
    }
  } else if (carried.pinned) {
    const auto peer = peers_.find(receiver);  // it may have been swept meanwhile
    if (peer != peers_.end() && peer->second.tokens.erase(carried.token) > 0)
      drop_pin(carried.id, effects);
  }
  return pack(std::move(effects));
}

void Lifetime::set_world(World world) {
  base::MutexLock lock(mutex_);
  world_ = std::move(world);
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
  if (id.creator != self_) return;
  const auto issued = next_k_.find(id.owner);
  if (issued == next_k_.end() || id.k >= issued->second) {
    throw Error(ErrorCode::protocol,
                to_string(id) + " was never created by worker " + std::to_string(self_.id));
  }
}

Effects Lifetime::receive(const CarriedRef& carried, const WorkerLife& sender,
                          const std::optional<Error>& lost_there) {
  base::MutexLock lock(mutex_);
  if (sender == self_) return {};  // pin() counted it
  TableEffects effects;
  if (leaving_) {  // it will not be used here
    if (carried.pinned) effects.ops.push_back({sender, LedgerOp::make_settle(carried.token)});
    return pack(std::move(effects));
  }
  meet_creator(carried.id, effects);
  if (!holders_.contains(carried.id) && (owners_.contains(carried.id) || !carried.lost) &&
      owners_.add_local(carried.id)) {
    if (carried.pinned) effects.ops.push_back({sender, LedgerOp::make_settle(carried.token)});
    return pack(std::move(effects));
  }
  std::optional<Error> lost = why_lost(carried.id);
  if (carried.lost && carried.id.owner == self_ && carried.id.creator == sender &&
      !owners_.contains(carried.id) && !owners_.deleted(carried.id)) {
    lost = Error(ErrorCode::cancelled,
                 to_string(carried.id) + " was not created: its creator could not ask for it");
  }
  if (!lost && carried.lost)
    lost = lost_there.value_or(Error(ErrorCode::disconnected,
                                     to_string(carried.id) + " was lost before it was sent here"));
  bool still_registered = false;
  if (!holders_.contains(carried.id) && !lost) {
    const auto owner = peers_.find(carried.id.owner);
    still_registered = owner != peers_.end() && owner->second.ledger.withdraw_drop(carried.id);
    if (still_registered) note_due(owner->second);
  }
  // What a worker that is over has lent protects nothing any more.
  const bool pinned = carried.pinned && !sweeps_.over(sender);
  if (carried.pinned && !pinned && !still_registered && !lost) lost = gone_.at(sender);
  holders_.receive(carried.id, {sender, carried.token, pinned, carried.created}, still_registered,
                   lost, effects);
  return pack(std::move(effects));
}

Effects Lifetime::message_done(const RRefId& id, const WorkerLife& sender) {
  base::MutexLock lock(mutex_);
  TableEffects effects;
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

Effects Lifetime::register_kept() {
  base::MutexLock lock(mutex_);
  TableEffects effects;
  holders_.register_kept(effects);
  return pack(std::move(effects));
}

bool Lifetime::encode_ledger(const WorkerLife& peer, base::Bytes& out) {
  if (due_peers_.load(std::memory_order_relaxed) == 0) return false;
  base::MutexLock lock(mutex_);
  const auto found = peers_.find(peer);
  if (found == peers_.end()) return false;
  found->second.announced = Urgency::none;
  const bool any = found->second.ledger.encode(out);
  note_due(found->second);
  return any;
}

void Lifetime::note_due(PeerState& state) {
  const bool due = state.ledger.urgency() != Urgency::none;
  // A flush that was asked for will find nothing: the next operation asks for its own.
  if (!due) state.announced = Urgency::none;
  if (due == state.due) return;
  state.due = due;
  due_peers_.store(due_peers_.load(std::memory_order_relaxed) + (due ? 1 : std::size_t(-1)),
                   std::memory_order_relaxed);
}

Effects Lifetime::accept_ledger(const WorkerLife& peer, std::span<const std::byte> frame) {
  base::MutexLock lock(mutex_);
  TableEffects effects;
  if (gone_.contains(peer)) return {};
  PeerState& state = peers_[peer];
  // Applied under the lock that encode_ledger() takes: a frame acknowledges only what has been
  // applied (G3).
  Ledger::Arrived arrived;
  std::size_t applied = 0;
  try {
    arrived = state.ledger.accept(frame);
    for (const LedgerOp& op : arrived.acknowledged) {
      if (op.kind == LedgerOp::Kind::reg) holders_.registered(op.id, effects);
    }
    for (; applied < arrived.ops.size(); ++applied)
      apply(arrived.ops[applied], peer, state, effects);
  } catch (const Error& error) {
    effects.broken = error;
  } catch (const std::bad_alloc&) {
    state.ledger.put_back(arrived.ops.size() - applied);  // they are sent again
  }
  Effects packed = pack(std::move(effects));
  announce(peer, state, packed);
  return packed;
}

Effects Lifetime::tick() {
  base::MutexLock lock(mutex_);
  TableEffects effects;
  holders_.tick(effects);
  Effects packed = pack(std::move(effects));
  for (auto& [peer, state] : peers_) {
    if (state.ledger.tick()) {
      state.announced = Urgency::soon;
      packed.flush.emplace_back(peer, Urgency::soon);
      note_due(state);
    }
  }
  return packed;
}

Effects Lifetime::pack(TableEffects effects) {
  for (const TableEffects::Op& op : effects.ops) {
    if (gone_.contains(op.to)) continue;
    PeerState& peer = peers_[op.to];
    peer.ledger.push(op.op);
    announce(op.to, peer, effects);
  }
  return std::move(static_cast<Effects&>(effects));
}

void Lifetime::announce(const WorkerLife& peer, PeerState& state, Effects& effects) {
  note_due(state);
  const Urgency urgency = state.ledger.urgency();
  if (urgency <= state.announced) return;
  state.announced = urgency;
  effects.flush.emplace_back(peer, urgency);
}

void Lifetime::drop_pin(const RRefId& id, TableEffects& effects) {
  if (owners_.contains(id)) {
    owners_.unpin(id, effects);
  } else {
    holders_.unpin(id, effects);
  }
}

void Lifetime::apply(const LedgerOp& op, const WorkerLife& peer, PeerState& from,
                     TableEffects& effects) {
  if (op.kind == LedgerOp::Kind::settle) {
    if (op.first_token + op.tokens > from.next_token) {
      throw Error(ErrorCode::protocol, "reference ledger: settles token " +
                                           std::to_string(op.first_token + op.tokens - 1) + ", " +
                                           std::to_string(from.next_token) + " were sent");
    }
    auto at = from.tokens.lower_bound(op.first_token);
    while (at != from.tokens.end() && at->first - op.first_token < op.tokens) {
      drop_pin(at->second, effects);
      at = from.tokens.erase(at);
    }
    return;
  }
  if (op.kind == LedgerOp::Kind::gone) return apply_gone(op.id, peer, effects);
  if (op.kind != LedgerOp::Kind::reg && op.kind != LedgerOp::Kind::drop &&
      op.kind != LedgerOp::Kind::unmade) {
    apply_sweep(op, peer, effects);
    return;
  }
  if (op.id.owner != self_) {
    throw Error(ErrorCode::protocol, "reference ledger: names " + to_string(op.id) + " to worker " +
                                         std::to_string(self_.id) + " epoch " +
                                         std::to_string(self_.epoch));
  }
  check_locked(op.id);
  meet_creator(op.id, effects);
  // A peer that was not known here when a sweep ended, or had its reference through such a one, may
  // name an object that has been deleted: it is told. Before any sweep G3 rules it out.
  if (op.kind != LedgerOp::Kind::unmade && owners_.deleted(op.id) && sweeps_.any_ended()) {
    if (op.kind == LedgerOp::Kind::reg) effects.ops.push_back({peer, LedgerOp::make_gone(op.id)});
    return;
  }
  if (op.kind == LedgerOp::Kind::reg) {
    owners_.add_holder(op.id, peer);
  } else if (op.kind == LedgerOp::Kind::unmade) {
    if (op.id.creator != peer)
      throw Error(ErrorCode::protocol, "reference ledger: worker " + std::to_string(peer.id) +
                                           " did not create " + to_string(op.id));
    owners_.not_requested(
        op.id, Error(ErrorCode::cancelled, "its creator could not send the request"), effects);
  } else {
    owners_.drop_holder(op.id, peer, effects);
  }
}

}  // namespace stitch::rref
