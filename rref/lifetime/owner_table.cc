#include "stitch/rref/lifetime/owner_table.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

namespace stitch::rref {

OwnerTable::OwnedEntry* OwnerTable::find_or_add_placeholder(const RRefId& id) {
  const auto found = entries_.find(id);
  if (found != entries_.end()) return &found->second;
  if (id.owner != self_ || deleted(id)) return nullptr;
  return &add_placeholder(id);
}

OwnerTable::OwnedEntry& OwnerTable::add_placeholder(const RRefId& id) {
  std::unique_ptr<Rare> failed;
  if (!gone_creators_.empty()) {
    if (const auto gone = gone_creators_.find(id.creator); gone != gone_creators_.end())
      failed.reset(new Rare{gone->second, {}});
  }
  OwnedEntry& entry = entries_[id];
  if (failed) {
    // Its k stays unseen: other workers may still hold references, and each that arrives adds this
    // placeholder again.
    entry.requested = true;
    entry.value = Value::failed;
    entry.rare = std::move(failed);
  }
  return entry;
}

void OwnerTable::add(const RRefId& id, std::shared_ptr<void> object, const std::string* made_by) {
  OwnedEntry& entry = entries_[id];
  try {
    seen_[id.creator].insert(id.k);
  } catch (...) {
    entries_.erase(id);
    throw;
  }
  entry.requested = true;
  entry.made_by = made_by;
  entry.local = 1;
  if (object != nullptr) {
    entry.object = std::move(object);
    entry.value = Value::ready;
  }
}

bool OwnerTable::create(const RRefId& id, const WorkerLife& creator, const std::string* made_by) {
  IntervalSet& seen = seen_[id.creator];
  const auto found = entries_.find(id);
  if (seen.contains(id.k)) {
    if (found != entries_.end()) return false;
    throw Error(ErrorCode::protocol, to_string(id) + " is requested again after it was deleted");
  }
  OwnedEntry* const entry = found == entries_.end() ? &add_placeholder(id) : &found->second;
  bool fresh_holder = false;
  try {
    // Before the function runs and before the answer can leave (G2): the creator is a holder until
    // it sends DROP.
    fresh_holder = entry->holders.insert(creator);
    seen.insert(id.k);
  } catch (...) {  // out of memory: nothing has been requested
    if (fresh_holder) entry->holders.erase(creator);
    if (found == entries_.end()) entries_.erase(id);
    throw;
  }
  entry->requested = true;
  entry->made_by = made_by;
  return true;
}

bool OwnerTable::resolve(const RRefId& id, std::shared_ptr<void> object,
                         const std::optional<Error>& failure, TableEffects& effects) {
  const auto found = entries_.find(id);
  if (found == entries_.end() || found->second.value != Value::pending) {
    if (object != nullptr) effects.destroy.push_back(std::move(object));
    return false;
  }
  found->second.object = std::move(object);
  if (failure) found->second.more().failure = failure;
  finish(found, failure ? Value::failed : Value::ready, effects);
  return true;
}

bool OwnerTable::add_local(const RRefId& id) {
  OwnedEntry* entry = find_or_add_placeholder(id);
  if (entry == nullptr) return false;
  ++entry->local;
  return true;
}

void OwnerTable::drop_local(const RRefId& id, TableEffects& effects) {
  const auto found = entries_.find(id);
  if (found == entries_.end()) return;
  --found->second.local;
  erase_if_unused(found, effects);
}

void OwnerTable::pin(const RRefId& id) {
  const auto found = entries_.find(id);
  if (found == entries_.end())
    throw Error(ErrorCode::internal, to_string(id) + " is not owned here");
  ++found->second.pins;
}

void OwnerTable::unpin(const RRefId& id, TableEffects& effects) {
  const auto found = entries_.find(id);
  if (found == entries_.end()) return;
  --found->second.pins;
  erase_if_unused(found, effects);
}

bool OwnerTable::deleted(const RRefId& id) const {
  if (id.owner != self_ || entries_.contains(id)) return false;
  const auto seen = seen_.find(id.creator);
  return seen != seen_.end() && seen->second.contains(id.k);
}

void OwnerTable::add_holder(const RRefId& id, const WorkerLife& holder) {
  OwnedEntry* entry = find_or_add_placeholder(id);
  if (entry == nullptr)
    throw Error(ErrorCode::protocol, to_string(id) + " is registered after it was deleted");
  entry->holders.insert(holder);
}

void OwnerTable::drop_holder(const RRefId& id, const WorkerLife& holder, TableEffects& effects) {
  const auto found = entries_.find(id);
  if (found == entries_.end())
    throw Error(ErrorCode::protocol, to_string(id) + " is dropped after it was deleted");
  if (!found->second.holders.erase(holder))
    throw Error(ErrorCode::protocol,
                to_string(id) + " is dropped by a worker that did not hold it");
  erase_if_unused(found, effects);
}

void OwnerTable::when_resolved(const RRefId& id, Waiter waiter, TableEffects& effects) {
  const auto found = entries_.find(id);
  if (found == entries_.end()) {
    effects.run.push_back(
        {std::move(waiter), nullptr, Error(ErrorCode::disconnected, to_string(id) + " is gone")});
  } else if (found->second.value == Value::pending) {
    found->second.more().waiters.push_back(std::move(waiter));
  } else {
    effects.run.push_back({std::move(waiter), found->second.object, found->second.failure()});
  }
}

void OwnerTable::creator_lost(const WorkerLife& creator, const Error& why, TableEffects& effects) {
  gone_creators_.emplace(creator, why);
  for (auto at = entries_.begin(); at != entries_.end();) {
    const auto next = std::next(at);
    if (at->first.creator == creator && !at->second.requested) {
      at->second.requested = true;
      at->second.more().failure = why;
      finish(at, Value::failed, effects);
    }
    at = next;
  }
}

void OwnerTable::not_requested(const RRefId& id, const Error& why, TableEffects& effects) {
  const auto seen = seen_.find(id.creator);
  if (seen != seen_.end() && seen->second.contains(id.k)) return;
  std::size_t& unmade = unmade_[id.creator];
  if (unmade >= max_unmade_) {
    throw Error(ErrorCode::protocol, to_string(id) + " was never requested, as were " +
                                         std::to_string(max_unmade_) +
                                         " others that their creator still holds");
  }
  std::unique_ptr<Rare> failed(new Rare{why, {}});
  static_cast<void>(create(id, id.creator));
  // Nothing below may fail: the operation would not be applied again.
  const auto found = entries_.find(id);
  if (found->second.rare) failed->waiters = std::move(found->second.rare->waiters);
  found->second.rare = std::move(failed);
  found->second.unmade = true;
  ++unmade;
  finish(found, Value::failed, effects);
}

void OwnerTable::drop_life(const WorkerLife& life, TableEffects& effects) {
  for (auto at = entries_.begin(); at != entries_.end();) {
    const auto next = std::next(at);
    if (at->second.holders.erase(life)) erase_if_unused(at, effects);
    at = next;
  }
  // One run in place of the others takes no memory.
  if (const auto seen = seen_.find(life); seen != seen_.end())
    seen->second.insert_run(0, std::numeric_limits<std::uint64_t>::max());
}

bool OwnerTable::lent() const {
  return std::any_of(entries_.begin(), entries_.end(), [](const auto& each) {
    const OwnedEntry& entry = each.second;
    return !entry.requested || !entry.holders.empty() || entry.pins > 0;
  });
}

void OwnerTable::drop_all_handles(TableEffects& effects) {
  for (auto at = entries_.begin(); at != entries_.end();) {
    const auto next = std::next(at);
    at->second.local = 0;
    erase_if_unused(at, effects);
    at = next;
  }
}

void OwnerTable::clear(const Error& why, TableEffects& effects) {
  for (auto& [id, entry] : std::exchange(entries_, {})) {
    seen_[id.creator].insert(id.k);
    if (entry.rare) {
      for (Waiter& waiter : entry.rare->waiters)
        effects.run.push_back({std::move(waiter), nullptr, why});
    }
    if (entry.object != nullptr) effects.destroy.push_back(std::move(entry.object));
  }
  unmade_.clear();
}

std::optional<OwnerTable::Status> OwnerTable::status(const RRefId& id) const {
  const auto found = entries_.find(id);
  if (found == entries_.end()) return std::nullopt;
  return status_of(found->second);
}

std::vector<std::pair<RRefId, OwnerTable::Status>> OwnerTable::list() const {
  std::vector<std::pair<RRefId, Status>> all;
  all.reserve(entries_.size());
  for (const auto& [id, entry] : entries_) all.emplace_back(id, status_of(entry));
  return all;
}

OwnerTable::Status OwnerTable::status_of(const OwnedEntry& entry) {
  return Status{entry.value, entry.requested, entry.object,  entry.failure(), entry.holders.list(),
                entry.local, entry.pins,      entry.made_by, entry.since};
}

OwnerTable::Counts OwnerTable::counts() const {
  Counts counts;
  for (const auto& [id, entry] : entries_) {
    ++counts.entries[static_cast<std::size_t>(entry.value)];
    counts.holders += entry.holders.size();
    if (entry.rare) counts.waiters += entry.rare->waiters.size();
  }
  for (const auto& [creator, numbers] : seen_) counts.runs_remembered += numbers.runs();
  return counts;
}

void OwnerTable::finish(Map::iterator at, Value value, TableEffects& effects) {
  OwnedEntry& entry = at->second;
  entry.value = value;
  if (entry.rare) {
    for (Waiter& waiter : std::exchange(entry.rare->waiters, {}))
      effects.run.push_back({std::move(waiter), entry.object, entry.failure()});
    if (value == Value::ready) entry.rare.reset();
  }
  erase_if_unused(at, effects);
}

void OwnerTable::erase_if_unused(Map::iterator at, TableEffects& effects) {
  OwnedEntry& entry = at->second;
  if (entry.value == Value::pending || entry.local > 0 || entry.pins > 0 || !entry.holders.empty())
    return;
  if (entry.object != nullptr) effects.destroy.push_back(std::move(entry.object));
  if (entry.unmade) {
    const auto unmade = unmade_.find(at->first.creator);
    if (--unmade->second == 0) unmade_.erase(unmade);
  }
  entries_.erase(at);
}

}  // namespace stitch::rref
