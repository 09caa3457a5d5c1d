#include "stitch/rref/lifetime/holder_table.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace stitch::rref {

HolderTable::Hold& HolderTable::at(const RRefId& id) {
  const auto found = holds_.find(id);
  if (found == holds_.end()) throw Error(ErrorCode::internal, to_string(id) + " is not held here");
  return found->second;
}

void HolderTable::begin_create(const RRefId& id, const std::string* made_by) {
  Hold& hold = holds_[id];
  hold.made_by = made_by;
  hold.state = State::creating;
  hold.local = 1;
}

void HolderTable::answered(const RRefId& id, const std::optional<Error>& failure,
                           TableEffects& effects) {
  const auto found = holds_.find(id);
  if (found == holds_.end() || found->second.state != State::creating) return;  // lost meanwhile
  found->second.created = true;
  found->second.answered = true;
  found->second.set_error(failure);
  become_registered(found, effects);
}

void HolderTable::create_not_sent(const RRefId& id, const Error& why, TableEffects& effects) {
  const auto found = holds_.find(id);
  if (found == holds_.end() || found->second.state != State::creating) return;
  if (found->second.told) effects.ops.push_back({id.owner, LedgerOp::make_unmade(id)});
  lose(found, why, effects);
}

void HolderTable::add_local(const RRefId& id) { ++at(id).local; }

void HolderTable::drop_local(const RRefId& id, TableEffects& effects) {
  const auto found = holds_.find(id);
  if (found == holds_.end()) return;
  --found->second.local;
  erase_if_unused(found, effects);
}

bool HolderTable::pin(const RRefId& id) {
  Hold& hold = at(id);
  if (hold.state == State::lost) return false;
  ++hold.pins;
  if (hold.state == State::creating) hold.told = true;
  return true;
}

void HolderTable::unpin(const RRefId& id, TableEffects& effects) {
  const auto found = holds_.find(id);
  if (found == holds_.end()) return;
  Hold& hold = found->second;
  --hold.pins;
  if (hold.state == State::lost && hold.pins == 0) settle(hold, effects);
  erase_if_unused(found, effects);
}

void HolderTable::receive(const RRefId& id, const Arrival& arrival,
                          const std::optional<Error>& lost, TableEffects& effects) {
  const auto [found, fresh] = holds_.try_emplace(id);
  Hold& hold = found->second;
  if (fresh && lost) {
    hold.state = State::lost;
    hold.set_error(lost);
  }
  ++hold.local;
  ++hold.arriving;
  hold.created = hold.created || arrival.created;
  if (!arrival.pinned) return;
  // Any other Hold depends on the sender's pin and keeps the token (G1, case "receive").
  if (hold.state == State::registered || hold.state == State::lost) {
    effects.ops.push_back({arrival.sender, LedgerOp::make_settle(arrival.token)});
  } else {
    hold.more().creditors.push_back({arrival.sender, arrival.token});
  }
}

void HolderTable::message_done(const RRefId& id, TableEffects& effects) {
  const auto found = holds_.find(id);
  if (found == holds_.end()) return;
  Hold& hold = found->second;
  --hold.local;
  --hold.arriving;
  if (hold.state == State::borrowed && hold.alive() && hold.arriving == 0) {
    kept_.insert(id);
    effects.kept = true;
  } else {
    erase_if_unused(found, effects);
  }
}

void HolderTable::register_kept(TableEffects& effects) {
  const std::vector<RRefId> kept(kept_.begin(), kept_.end());
  for (const RRefId& id : kept) {
    Hold& hold = at(id);
    if (hold.arriving > 0) {  // decided when the last of its messages is done
      kept_.erase(id);
      hold.kept_before = false;
    } else if (hold.kept_before) {
      start_registering(id, hold, effects);
    } else {
      hold.kept_before = true;
    }
  }
  effects.kept = effects.kept || !kept_.empty();
}

void HolderTable::registered(const RRefId& id, TableEffects& effects) {
  const auto found = holds_.find(id);
  if (found != holds_.end() && found->second.state == State::registering)
    become_registered(found, effects);
}

void HolderTable::owner_lost(const WorkerLife& owner, const Error& why, TableEffects& effects) {
  for (auto at = holds_.begin(); at != holds_.end();) {
    const auto next = std::next(at);
    if (at->first.owner == owner && at->second.state != State::lost) lose(at, why, effects);
    at = next;
  }
}

void HolderTable::gone(const RRefId& id, const Error& why, TableEffects& effects) {
  const auto found = holds_.find(id);
  if (found == holds_.end() || found->second.state != State::registering) return;
  // The object is needed by none, so its pins protect nothing: two workers that have lent it to one
  // another would wait for each other's SETTLE without end.
  settle(found->second, effects);
  lose(found, why, effects);
}

void HolderTable::owner_over(const WorkerLife& owner, TableEffects& effects) {
  for (auto& [id, hold] : holds_) {
    if (id.owner == owner) settle(hold, effects);
  }
}

void HolderTable::register_borrowed_from(const WorkerLife& lender, TableEffects& effects) {
  for (auto& [id, hold] : holds_) {
    if (hold.state == State::borrowed && hold.rare &&
        std::any_of(hold.rare->creditors.begin(), hold.rare->creditors.end(),
                    [&](const Creditor& each) { return each.sender == lender; }))
      start_registering(id, hold, effects);
  }
}

void HolderTable::drop_all_handles(TableEffects& effects) {
  for (auto at = holds_.begin(); at != holds_.end();) {
    const auto next = std::next(at);
    at->second.local = 0;
    at->second.arriving = 0;
    erase_if_unused(at, effects);
    at = next;
  }
}

bool HolderTable::tracks_creation(const RRefId& id) const {
  const auto found = holds_.find(id);
  return found != holds_.end() && (found->second.state == State::creating ||
                                   found->second.state == State::lost || found->second.answered);
}

void HolderTable::when_answered(const RRefId& id, Waiter waiter, TableEffects& effects) {
  Hold& hold = at(id);
  if (hold.state == State::creating) {
    hold.more().waiters.push_back(std::move(waiter));
  } else {
    effects.run.push_back({std::move(waiter), nullptr, hold.error()});
  }
}

std::optional<HolderTable::Status> HolderTable::status(const RRefId& id) const {
  const auto found = holds_.find(id);
  if (found == holds_.end()) return std::nullopt;
  return status_of(found->second);
}

std::vector<std::pair<RRefId, HolderTable::Status>> HolderTable::list() const {
  std::vector<std::pair<RRefId, Status>> all;
  all.reserve(holds_.size());
  for (const auto& [id, hold] : holds_) all.emplace_back(id, status_of(hold));
  return all;
}

HolderTable::Status HolderTable::status_of(const Hold& hold) {
  return {hold.state, hold.created, hold.error(),     hold.local,
          hold.pins,  hold.made_by, hold.since.time()};
}

HolderTable::Counts HolderTable::counts() const {
  Counts counts;
  for (const auto& [id, hold] : holds_) {
    ++counts.holds[static_cast<std::size_t>(hold.state)];
    if (hold.rare) counts.creditors += hold.rare->creditors.size();
  }
  counts.registrations = registrations_;
  return counts;
}

void HolderTable::settle(Hold& hold, TableEffects& effects) {
  if (!hold.rare) return;
  for (const Creditor& creditor : std::exchange(hold.rare->creditors, {})) {
    effects.ops.push_back({creditor.sender, LedgerOp::make_settle(creditor.token)});
  }
}

void HolderTable::release_waiters(Hold& hold, TableEffects& effects) {
  if (!hold.rare) return;
  for (Waiter& waiter : std::exchange(hold.rare->waiters, {}))
    effects.run.push_back({std::move(waiter), nullptr, hold.error()});
}

void HolderTable::start_registering(const RRefId& id, Hold& hold, TableEffects& effects) {
  kept_.erase(id);
  hold.state = State::registering;
  ++registrations_;
  effects.ops.push_back({id.owner, LedgerOp::make_reg(id)});
  // Tokens of the owner itself are settled in the same ledger, behind the REG: the order of the
  // ledger is enough, no acknowledgement is needed.
  if (!hold.rare) return;
  std::vector<Creditor> others;
  for (const Creditor& creditor : std::exchange(hold.rare->creditors, {})) {
    if (creditor.sender == id.owner) {
      effects.ops.push_back({creditor.sender, LedgerOp::make_settle(creditor.token)});
    } else {
      others.push_back(creditor);
    }
  }
  hold.rare->creditors = std::move(others);
}

void HolderTable::become_registered(Map::iterator at, TableEffects& effects) {
  at->second.state = State::registered;
  settle(at->second, effects);  // not before: the chain of pins protected the Hold (G3)
  release_waiters(at->second, effects);
  if (!at->second.error()) at->second.rare.reset();
  erase_if_unused(at, effects);
}

void HolderTable::lose(Map::iterator at, const Error& why, TableEffects& effects) {
  Hold& hold = at->second;
  kept_.erase(at->first);
  hold.state = State::lost;
  hold.set_error(why);
  // Nothing here needs the object any more, but what was lent on from here may.
  if (hold.pins == 0) settle(hold, effects);
  release_waiters(hold, effects);
  erase_if_unused(at, effects);
}

void HolderTable::erase_if_unused(Map::iterator at, TableEffects& effects) {
  Hold& hold = at->second;
  if (hold.alive()) return;
  switch (hold.state) {
    case State::creating:
    case State::registering:
      return;  // the answer decides
    case State::borrowed:
      settle(hold, effects);
      kept_.erase(at->first);
      break;
    case State::registered:
      effects.ops.push_back({at->first.owner, LedgerOp::make_drop(at->first)});
      break;
    case State::lost:
      settle(hold, effects);
      // Since UNMADE, the owner counts this worker as a holder of the creation that failed.
      if (hold.told) effects.ops.push_back({at->first.owner, LedgerOp::make_drop(at->first)});
      break;
  }
  holds_.erase(at);
}

}  // namespace stitch::rref
