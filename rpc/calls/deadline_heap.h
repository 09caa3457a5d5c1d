#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <utility>
#include <vector>

namespace stitch::rpc {

// A heap of objects ordered by deadline. Each object knows its place in the heap, so it can be
// removed at any time. T has a member `std::size_t heap_place`, is neither copied nor moved while
// it is in here, and is not owned. Adding deadlines in ascending order is cheap. A removal writes
// into one object of each level, which other processors have in their caches: nodes have many
// children, so that there are few levels. Memory is kept for later use. Not thread-safe.
template <class T>
class DeadlineHeap {
 public:
  using Time = std::chrono::steady_clock::time_point;
  static constexpr std::size_t kNowhere = static_cast<std::size_t>(-1);

  [[nodiscard]] bool empty() const noexcept { return nodes_.empty(); }
  // max() when there is none.
  [[nodiscard]] Time first_deadline() const noexcept {
    return nodes_.empty() ? Time::max() : nodes_.front().deadline;
  }
  // REQUIRES: not empty.
  [[nodiscard]] T& first() const noexcept { return *nodes_.front().object; }
  void add(T& object, Time deadline) {
    nodes_.push_back({deadline, &object});
    rise(nodes_.size() - 1);
  }
  // Does nothing for an object that is not in here.
  void remove(T& object) noexcept {
    const std::size_t place = std::exchange(object.heap_place, kNowhere);
    if (place == kNowhere) return;
    const Node last = nodes_.back();
    nodes_.pop_back();
    if (place == nodes_.size()) return;
    nodes_[place] = last;
    rise(sink(place));
  }

 private:
  static constexpr std::size_t kChildren = 16;
  struct Node {
    Time deadline;
    T* object;
  };
  void put(std::size_t place, const Node& node) noexcept {
    nodes_[place] = node;
    node.object->heap_place = place;
  }
  void rise(std::size_t place) noexcept {
    const Node node = nodes_[place];
    while (place > 0 && node.deadline < nodes_[(place - 1) / kChildren].deadline) {
      put(place, nodes_[(place - 1) / kChildren]);
      place = (place - 1) / kChildren;
    }
    put(place, node);
  }
  // Returns the new place.
  std::size_t sink(std::size_t place) noexcept {
    const Node node = nodes_[place];
    for (;;) {
      const std::size_t first = kChildren * place + 1;
      if (first >= nodes_.size()) break;
      const std::size_t end = std::min(first + kChildren, nodes_.size());
      std::size_t child = first;
      for (std::size_t each = first + 1; each < end; ++each) {
        if (nodes_[each].deadline < nodes_[child].deadline) child = each;
      }
      if (!(nodes_[child].deadline < node.deadline)) break;
      put(place, nodes_[child]);
      place = child;
    }
    put(place, node);
    return place;
  }

  std::vector<Node> nodes_;
};

}  // namespace stitch::rpc
