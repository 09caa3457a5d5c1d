#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "stitch/rpc/message/precedence.h"

namespace stitch::rpc {

// Which of the requests that wait for one peer begin before others of them. Their ids are never 0,
// and in the order in which they were made. Part of a PeerFlow. Thread contract: none of its own,
// that of its owner.
class BeginOrder {
 public:
  using Key = std::uint64_t;
  using Id = std::uint64_t;

  // One that waits. Nothing has changed if this throws.
  void add(Id id, const Precedence& precedence) {
    try {
      for (const Key key : precedence.leads) leading_.emplace(key, id);
      for (const Key key : precedence.follows) following_.emplace(key, id);
    } catch (...) {
      remove(id, precedence);
      throw;
    }
  }
  // It has begun, or never will.
  void remove(Id id, const Precedence& precedence) noexcept {
    for (const Key key : precedence.leads) leading_.erase({key, id});
    for (const Key key : precedence.follows) following_.erase({key, id});
  }
  // Whether none that waits has to begin before a request of that id.
  [[nodiscard]] bool first(Id id, const Precedence& precedence) const noexcept {
    return std::none_of(precedence.follows.begin(), precedence.follows.end(),
                        [&](Key key) { return first_leader(key) < id; });
  }
  // The last one made before `id` of those that lead `key`; 0: none.
  [[nodiscard]] Id leader_before(Key key, Id id) const noexcept {
    const auto at = leading_.lower_bound({key, id});
    if (at == leading_.begin()) return 0;
    const auto& [its_key, its_id] = *std::prev(at);
    return its_key == key ? its_id : 0;
  }
  // The first one made after `id` of those that follow `key` and that no leader of it keeps
  // waiting; 0: none.
  [[nodiscard]] Id free_follower_after(Key key, Id id) const noexcept {
    const auto at = following_.upper_bound({key, id});
    if (at == following_.end() || at->first != key) return 0;
    return at->second <= first_leader(key) ? at->second : 0;
  }

 private:
  [[nodiscard]] Id first_leader(Key key) const noexcept {
    const auto at = leading_.lower_bound({key, 0});
    return at == leading_.end() || at->first != key ? std::numeric_limits<Id>::max() : at->second;
  }

  std::set<std::pair<Key, Id>> leading_;
  std::set<std::pair<Key, Id>> following_;
};

}  // namespace stitch::rpc
