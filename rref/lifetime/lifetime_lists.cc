// What a worker's references are: of one, and numbers and lists for people and tests.
#include <algorithm>
#include <utility>

#include "stitch/rref/lifetime/lifetime.h"

namespace stitch::rref {

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

bool Lifetime::owns(const RRefId& id) const {
  base::MutexLock lock(mutex_);
  return owners_.contains(id);
}

bool Lifetime::needs_tick() const {
  base::MutexLock lock(mutex_);
  return holders_.borrowed() > 0 || std::any_of(peers_.begin(), peers_.end(), [](const auto& each) {
           return each.second.ledger.unacknowledged() > 0;
         });
}

Lifetime::Counts Lifetime::counts() const {
  base::MutexLock lock(mutex_);
  Counts counts;
  counts.owned = owners_.counts();
  counts.held = holders_.counts();
  counts.entries = owners_.size();
  counts.holds = holders_.size();
  for (const auto& [peer, state] : peers_) {
    counts.tokens += state.tokens.size();
    counts.ledger_unsent += state.ledger.unsent();
    counts.ledger_unacknowledged += state.ledger.unacknowledged();
  }
  counts.unswept = sweeps_.unswept().size();
  return counts;
}

std::vector<ListedRef> Lifetime::list() const {
  base::MutexLock lock(mutex_);
  std::vector<ListedRef> all;
  all.reserve(owners_.size() + holders_.size());
  for (auto& [id, status] : owners_.list()) all.push_back({id, std::move(status), std::nullopt});
  for (auto& [id, status] : holders_.list()) all.push_back({id, std::nullopt, std::move(status)});
  return all;
}

}  // namespace stitch::rref
