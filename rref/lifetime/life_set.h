#pragma once

#include <cstddef>
#include <limits>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "stitch/rref/lifetime/rref_id.h"

namespace stitch::rref {

// A set of lives, small where it has one element at most, as most sets of holders have. Move-only.
// Not thread-safe.
class LifeSet {
 public:
  void insert(const WorkerLife& life) {
    if (more_) {
      more_->insert(life);
    } else if (one_ == kNone) {
      one_ = life;
    } else if (one_ != life) {
      auto both = std::make_unique<std::set<WorkerLife>>();
      both->insert(one_);
      both->insert(life);
      more_ = std::move(both);
    }
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
  WorkerLife one_ = kNone;                      // unless there are more
  std::unique_ptr<std::set<WorkerLife>> more_;  // null: at most one_
};

}  // namespace stitch::rref
