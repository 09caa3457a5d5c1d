#pragma once

#include <cstddef>
#include <limits>
#include <memory>
#include <set>
#include <vector>

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
      more_ = std::make_unique<Many>(Many{one_, life});
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
  using Many = std::set<WorkerLife>;
  WorkerLife one_ = kNone;      // unless there are more
  std::unique_ptr<Many> more_;  // null: at most one_
};

}  // namespace stitch::rref
