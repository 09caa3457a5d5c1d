#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "stitch/base/error.h"

namespace stitch::transport {

// A limit for the bytes that a store keeps for all its clients together, for one purpose. Thread
// contract: not thread-safe; the store's loop thread only.
class ByteBudget {
 public:
  explicit ByteBudget(std::size_t limit) : limit_(limit) {}
  // Throws Error(overloaded) when less is left.
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

// Bytes taken of a budget, given back by the destructor. Without a budget it does nothing.
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
  // Throws Error(overloaded), without a change, when there is not enough left.
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
