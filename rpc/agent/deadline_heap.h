#pragma once

#include <chrono>
#include <cstddef>
#include <utility>
#include <vector>

namespace stitch::rpc {

// Entries ordered by deadline, each of which knows its place, so that it can be taken out at any
// time. T has a member `std::size_t heap_place`, is neither copied nor moved while it is in here,
// and belongs to somebody else. Adding deadlines in ascending order and taking out of a small heap
// cost next to nothing; memory is kept for later entries. Not thread-safe.
template <class T>
class DeadlineHeap {
 public:
  using Time = std::chrono::steady_clock::time_point;
  static constexpr std::size_t kNowhere = static_cast<std::size_t>(-1);

  [[nodiscard]] bool empty() const noexcept { return entries_.empty(); }
  // max() when there is none.
  [[nodiscard]] Time first_deadline() const noexcept {
    return entries_.empty() ? Time::max() : entries_.front().deadline;
  }
  // REQUIRES: not empty.
  [[nodiscard]] T& first() const noexcept { return *entries_.front().what; }
  void add(T& what, Time deadline) {
    entries_.push_back({deadline, &what});
    rise(entries_.size() - 1);
  }
  // Does nothing for one that is not in here.
  void remove(T& what) noexcept {
    const std::size_t place = std::exchange(what.heap_place, kNowhere);
    if (place == kNowhere) return;
    const Entry last = entries_.back();
    entries_.pop_back();
    if (place == entries_.size()) return;
    entries_[place] = last;
    rise(sink(place));
  }

 private:
  struct Entry {
    Time deadline;
    T* what;
  };
  void put(std::size_t place, const Entry& entry) noexcept {
    entries_[place] = entry;
    entry.what->heap_place = place;
  }
  void rise(std::size_t place) noexcept {
    const Entry entry = entries_[place];
    while (place > 0 && entry.deadline < entries_[(place - 1) / 2].deadline) {
      put(place, entries_[(place - 1) / 2]);
      place = (place - 1) / 2;
    }
    put(place, entry);
  }
  // Returns where the entry has come to.
  std::size_t sink(std::size_t place) noexcept {
    const Entry entry = entries_[place];
    for (;;) {
      std::size_t child = 2 * place + 1;
      if (child >= entries_.size()) break;
      if (child + 1 < entries_.size() && entries_[child + 1].deadline < entries_[child].deadline)
        ++child;
      if (!(entries_[child].deadline < entry.deadline)) break;
      put(place, entries_[child]);
      place = child;
    }
    put(place, entry);
    return place;
  }

  std::vector<Entry> entries_;
};

}  // namespace stitch::rpc
