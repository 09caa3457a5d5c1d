// What a worker's references are: numbers and lists, for people and tests.
#include <utility>

#include "stitch/rref/lifetime/lifetime.h"

namespace stitch::rref {

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
