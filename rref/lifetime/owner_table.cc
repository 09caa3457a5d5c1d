#include "stitch/rref/lifetime/owner_table.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

namespace stitch::rref {

OwnerTable::OwnedEntry* OwnerTable::find_or_add_placeholder(const RRefId& id,
                                                            const WorkerLife& teller) {
  const auto found = entries_.find(id);
  if (found != entries_.end()) return &found->second;
  if (id.owner != self_ || deleted(id) || !count_unrequested(teller)) return nullptr;
  OwnedEntry& entry = entries_[id];
  entry.more().named_by = teller;
  return &entry;
}

bool OwnerTable::count_unrequested(const WorkerLife& teller) {
  std::size_t& count = unrequested_[teller];
  if (count >= max_unrequested_) return false;
  ++count;
  return true;
}

void OwnerTable::count_requested(OwnedEntry& entry) {
  if (!entry.rare || !entry.rare->named_by) return;
  const auto count = unrequested_.find(*std::exchange(entry.rare->named_by, std::nullopt));
  if (--count->second == 0) unrequested_.erase(count);
}

void OwnerTable::add(const RRefId& id, std::shared_ptr<void> object, const std::string* made_by) {
  OwnedEntry& entry = entries_[id];
  entry.requested = true;
  entry.made_by = made_by;
  entry.local = 1;
  if (object != nullptr) {
    entry.object = std::move(object);
    entry.value = Value::ready;
  }
}

bool OwnerTable::create(const RRefId& id, const WorkerLife& creator, const std::string* made_by) {
  if (!seen_[id.creator].insert(id.k)) {
    if (entries_.contains(id)) return false;
    throw Error(ErrorCode::protocol, to_string(id) + " is requested again after it was deleted");
  }
  OwnedEntry& entry = entries_[id];  // a placeholder, or new
  count_requested(entry);
  // Before the function runs and before the answer can leave (G2): the creator is a holder until it
  // sends DROP.
  entry.holders.insert(creator);
  entry.requested = true;
  entry.made_by = made_by;
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

void OwnerTable::add_local(const RRefId& id) {
  const auto found = entries_.find(id);
  if (found != entries_.end()) ++found->second.local;
}

bool OwnerTable::receive(const RRefId& id, const WorkerLife& teller) {
  OwnedEntry* const entry = find_or_add_placeholder(id, teller);
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
  if (id.creator == self_) return true;
  const auto seen = seen_.find(id.creator);
  return seen != seen_.end() && seen->second.contains(id.k);
}

bool OwnerTable::add_holder(const RRefId& id, const WorkerLife& holder) {
  OwnedEntry* const entry = find_or_add_placeholder(id, holder);
  if (entry == nullptr) return false;
  entry->holders.insert(holder);
  return true;
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

std::set<WorkerLife> OwnerTable::former_creators(const WorkerLife& life) const {
  std::set<WorkerLife> creators;
  for (const auto& [id, entry] : entries_) {
    if (!entry.requested && id.creator.id == life.id && id.creator.epoch < life.epoch)
      creators.insert(id.creator);
  }
  return creators;
}

void OwnerTable::not_requested(const RRefId& id, const Error& why, TableEffects& effects) {
  const auto seen = seen_.find(id.creator);
  if (seen != seen_.end() && seen->second.contains(id.k)) return;
  if (!count_unrequested(id.creator)) {
    throw Error(ErrorCode::protocol, to_string(id) + " was never requested, as were " +
                                         std::to_string(max_unrequested_) +
                                         " others that its creator has named");
  }
  static_cast<void>(create(id, id.creator));
  const auto found = entries_.find(id);
  found->second.more().failure = why;
  found->second.rare->named_by = id.creator;
  finish(found, Value::failed, effects);
}

void OwnerTable::drop_life(const WorkerLife& life, TableEffects& effects) {
  for (auto at = entries_.begin(); at != entries_.end();) {
    const auto next = std::next(at);
    if (at->second.holders.erase(life)) erase_if_unused(at, effects);
    at = next;
  }
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
    if (id.creator != self_) seen_[id.creator].insert(id.k);
    if (entry.rare) {
      for (Waiter& waiter : entry.rare->waiters)
        effects.run.push_back({std::move(waiter), nullptr, why});
    }
    if (entry.object != nullptr) effects.destroy.push_back(std::move(entry.object));
  }
  unrequested_.clear();
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
  const bool being_created = entry.value == Value::pending && entry.requested;
  if (being_created || entry.local > 0 || entry.pins > 0 || !entry.holders.empty()) return;
  if (entry.object != nullptr) effects.destroy.push_back(std::move(entry.object));
  if (entry.rare) {  // of calls that have been answered: no waiter ends under the lock
    const Error why(ErrorCode::cancelled, "nothing refers to the object any more");
    for (Waiter& waiter : entry.rare->waiters)
      effects.run.push_back({std::move(waiter), nullptr, why});
  }
  count_requested(entry);
  entries_.erase(at);
}

}  // namespace stitch::rref
