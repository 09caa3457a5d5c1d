// Which requests of a PeerFlow wait for others of it: see there.
#include <limits>
#include <utility>

#include "stitch/rpc/agent/peer_flow.h"

namespace stitch::rpc {

bool PeerFlow::waits_behind(const Precedence& precedence) const {
  if (precedence.follows.empty()) return false;
  base::MutexLock lock(mutex_);
  return !order_.first(std::numeric_limits<std::uint64_t>::max(), precedence);
}

// Nothing has changed if this throws.
void PeerFlow::keep(Waiting& request) {
  const std::uint64_t id = request.id;
  const Size size = request.size;
  order_.add(id, request.precedence);
  const bool first = order_.first(id, request.precedence);
  const Rank rank = size.inside ? Rank::inside : Rank::program;
  Queue& queue = first ? queues_[static_cast<std::size_t>(rank)][size.small()] : followers_;
  Queue::iterator at;
  try {
    at = queue.try_emplace(id, std::move(request), rank).first;
  } catch (...) {  // before anything was moved
    order_.remove(id, request.precedence);
    throw;
  }
  if (first) {
    waiting_.fetch_add(units(size));
  } else if (size.inside) {
    lift(at->second);
  }
}

// What is inside must not wait for requests of the program that wait for room which others take
// that wait for it. What a lifted one follows was lifted with it, and what one inside follows,
// too.
void PeerFlow::lift(Entry& follower) noexcept {
  for (Entry* each = &follower; each != nullptr;) {
    Entry* rest = std::exchange(each->next, nullptr);
    for (const std::uint64_t key : each->request.precedence.follows) {
      std::uint64_t id = each->request.id;
      while ((id = order_.leader_before(key, id)) != 0) {
        Entry* const lifted = lift_one(id);
        if (lifted == nullptr) break;
        lifted->next = rest;
        rest = lifted;
      }
    }
    each = rest;
  }
}

// Null if it is none of the program, or is just being sent.
PeerFlow::Entry* PeerFlow::lift_one(std::uint64_t id) noexcept {
  for (Queue& queue : queues_[static_cast<std::size_t>(Rank::program)]) {
    if (auto found = queue.extract(id)) {
      Entry& lifted = found.mapped();  // it stays where it is in memory
      lifted.rank = Rank::lifted;
      queue_of(lifted).insert(std::move(found));
      return &lifted;
    }
  }
  const auto held = followers_.find(id);
  if (held == followers_.end() || held->second.rank != Rank::program) return nullptr;
  held->second.rank = Rank::lifted;
  return &held->second;
}

// A request that waited has begun, or never will.
void PeerFlow::let_follow(std::uint64_t id, const Precedence& precedence) noexcept {
  order_.remove(id, precedence);
  for (const std::uint64_t key : precedence.leads) {
    std::uint64_t next = 0;
    while ((next = order_.free_follower_after(key, next)) != 0) {
      const auto at = followers_.find(next);
      if (at == followers_.end() || !order_.first(next, at->second.request.precedence)) continue;
      auto free = followers_.extract(at);
      Queue& queue = queue_of(free.mapped());
      waiting_.fetch_add(units(free.mapped().request.size));
      queue.insert(std::move(free));
    }
  }
}

}  // namespace stitch::rpc
