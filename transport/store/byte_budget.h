#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "stitch/base/error.h"

namespace stitch::transport {

// The bytes that all clients of one store together may have it hold, for one purpose. Thread
// contract: none of its own; the store's loop thread only.
class ByteBudget {
 public:
  explicit ByteBudget(std::size_t limit) : limit_(limit) {}
  // Throws Error(overloaded) when that is more than is left.
  void take(std::size_t bytes) {
    if (bytes > limit_ - used_) {
      throw Error(ErrorCode::overloaded,
                  std::to_string(bytes) + " bytes more than the " + std::to_string(used_) +
                      " held for clients already are too many; the limit is " +
                      std::to_string(limit_));
    }
    used_ += bytes;
  }
  void give(std::size_t bytes) noexcept { used_ -= std::min(bytes, used_); }
  [[nodiscard]] std::size_t used() const noexcept { return used_; }

 private:
  const std::size_t limit_;
  std::size_t used_ = 0;
};

// What one thing takes of a budget, given back when it goes. Without a budget it counts nothing.
class BudgetShare {
 public:
  BudgetShare() = default;
  explicit BudgetShare(std::shared_ptr<ByteBudget> budget) : budget_(std::move(budget)) {}
  BudgetShare(BudgetShare&& other) noexcept
      : budget_(std::move(other.budget_)), bytes_(std::exchange(other.bytes_, 0)) {}
  BudgetShare& operator=(BudgetShare&& other) noexcept {
    std::swap(budget_, other.budget_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~BudgetShare() {
    if (budget_) budget_->give(bytes_);
  }
  // Throws Error(overloaded), and stays as it was, when there is not enough left.
  void resize(std::size_t bytes) {
    if (!budget_) return;
    if (bytes > bytes_) budget_->take(bytes - bytes_);
    if (bytes < bytes_) budget_->give(bytes_ - bytes);
    bytes_ = bytes;
  }

 private:
  std::shared_ptr<ByteBudget> budget_;
  std::size_t bytes_ = 0;
};

}  // namespace stitch::transport
