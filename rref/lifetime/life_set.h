#pragma once

#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "stitch/base/reserve.h"
#include "stitch/rref/lifetime/rref_id.h"

namespace stitch::rref {

// A set of lives, small where it has one element at most, as most sets of holders have. Move-only.
// Not thread-safe.
class LifeSet {
 public:
  // False if it was in the set.
  bool insert(const WorkerLife& life) {
    if (more_) return more_->insert(life).second;
    if (one_ == life) return false;
    if (one_ == kNone) {
      one_ = life;
    } else {
      auto both = std::make_unique<Many>();
      both->insert(one_);
      both->insert(life);
      more_ = std::move(both);
    }
    return true;
  }
  // False if it was not in the set.
  bool erase(const WorkerLife& life) {
    if (more_) return more_->erase(life) > 0;
    if (one_ != life) return false;
    one_ = kNone;
    return true;
  }
  [[nodiscard]] std::size_t size() const noexcept {
    return more_ ? more_->size() : static_cast<std::size_t>(one_ == kNone ? 0 : 1);
  }
  [[nodiscard]] bool empty() const noexcept { return size() == 0; }
  // Ascending.
  [[nodiscard]] std::vector<WorkerLife> list() const {
    if (more_) return {more_->begin(), more_->end()};
    if (one_ == kNone) return {};
    return {one_};
  }

 private:
  // No worker has this id: ids are ranks.
  static constexpr WorkerLife kNone{std::numeric_limits<std::uint32_t>::max(),
                                    std::numeric_limits<std::uint64_t>::max()};
  // Taken from the reserve: a registration may not fail.
  struct Many : std::set<WorkerLife, std::less<>, base::ReservedAllocator<WorkerLife>> {
    [[nodiscard]] static void* operator new(std::size_t bytes) {
      return base::take_recycled_or_reserved(bytes);
    }
    static void operator delete(void* at, std::size_t bytes) noexcept {
      base::recycle_or_give_back(at, bytes);
    }
  };
  WorkerLife one_ = kNone;      // unless there are more
  std::unique_ptr<Many> more_;  // null: at most one_
};

}  // namespace stitch::rref
