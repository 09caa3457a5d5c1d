#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <utility>
#include <vector>

namespace stitch::rref {

// A set of numbers stored as runs: the values of a counter seen so far, in memory proportional to
// the number of gaps. A peer chooses them: beyond kMaxRuns the numbers of the lowest gap count as
// seen. Not thread-safe.
class IntervalSet {
 public:
  static constexpr std::size_t kMaxRuns = std::size_t{1} << 16;
  // False if it was in the set.
  bool insert(std::uint64_t value) {
    auto next = runs_.upper_bound(value);
    if (next != runs_.begin()) {
      const auto previous = std::prev(next);
      if (value <= previous->second) return false;
      if (previous->second + 1 == value) {
        previous->second = value;
        if (next != runs_.end() && value != std::numeric_limits<std::uint64_t>::max() &&
            next->first == value + 1) {
          previous->second = next->second;
          runs_.erase(next);
        }
        return true;
      }
    }
    if (next != runs_.end() && value + 1 == next->first) {
      auto run = runs_.extract(next);
      run.key() = value;
      runs_.insert(std::move(run));
      return true;
    }
    runs_.emplace(value, value);
    close_lowest_gap();
    return true;
  }
  // Inserts every number below `end`.
  void insert_below(std::uint64_t end) {
    if (end != 0) insert_run(0, end - 1);
  }
  // Inserts every number from `first` to `last`. REQUIRES: first <= last.
  void insert_run(std::uint64_t first, std::uint64_t last) {
    auto next = runs_.upper_bound(first);
    if (next != runs_.begin()) {
      const auto previous = std::prev(next);
      if (last <= previous->second) return;
      if (first <= previous->second + 1) {  // it is not the greatest number: `last` is greater
        first = previous->first;
        runs_.erase(previous);
      }
    }
    while (next != runs_.end() && next->first - 1 <= last) {  // overlaps or touches
      last = std::max(last, next->second);
      next = runs_.erase(next);
    }
    runs_.emplace(first, last);
    close_lowest_gap();
  }
  [[nodiscard]] bool contains(std::uint64_t value) const {
    const auto next = runs_.upper_bound(value);
    return next != runs_.begin() && value <= std::prev(next)->second;
  }
  // The numbers from `first` to below `end` that are not in the set, ascending; of more than
  // `limit` the highest.
  [[nodiscard]] std::vector<std::uint64_t> missing(std::uint64_t first, std::uint64_t end,
                                                   std::size_t limit) const {
    std::vector<std::uint64_t> numbers;
    auto next = runs_.lower_bound(end);
    while (first < end && numbers.size() < limit) {
      if (next != runs_.begin() && std::prev(next)->second >= end - 1) {
        end = (--next)->first;
      } else {
        numbers.push_back(--end);
      }
    }
    std::reverse(numbers.begin(), numbers.end());
    return numbers;
  }
  [[nodiscard]] std::size_t runs() const noexcept { return runs_.size(); }

 private:
  void close_lowest_gap() {
    if (runs_.size() <= kMaxRuns) return;
    auto lowest = runs_.extract(runs_.begin());
    lowest.mapped() = runs_.begin()->second;
    runs_.erase(runs_.begin());
    runs_.insert(std::move(lowest));
  }

  std::map<std::uint64_t, std::uint64_t> runs_;  // first -> last, disjoint, never touching
};

}  // namespace stitch::rref
