#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "stitch/base/mutex.h"

namespace stitch::base {

// Objects by a small number, for many readers and a rare writer: reading takes no lock, and what
// has been published once stays where it is until the table is destroyed, also when another object
// takes its number. Thread contract: any thread; the objects have their own.
template <class T>
class PublishedTable {
 public:
  // Numbers are below this.
  static constexpr std::uint32_t kMaxSize = 1U << 16;

  PublishedTable() = default;
  ~PublishedTable() {
    for (auto& segment : segments_) delete segment.load();
  }

  // The object that was published last under this number; null if there is none.
  [[nodiscard]] T* at(std::uint32_t number) const noexcept {
    if (number >= kMaxSize) return nullptr;
    const Segment* segment = segments_[number / kSegment].load(std::memory_order_acquire);
    if (segment == nullptr) return nullptr;
    return segment->slots[number % kSegment].load(std::memory_order_acquire);
  }
  // One more than the highest number in use.
  [[nodiscard]] std::uint32_t end() const noexcept { return end_.load(std::memory_order_acquire); }
  // Throws std::out_of_range for a number that is too large.
  T& publish(std::uint32_t number, std::unique_ptr<T> object) STITCH_EXCLUDES(mutex_) {
    if (number >= kMaxSize) throw std::out_of_range("a number of a published table");
    const MutexLock lock(mutex_);
    auto& place = segments_[number / kSegment];
    if (place.load(std::memory_order_relaxed) == nullptr)
      place.store(new Segment, std::memory_order_release);
    T& published = *kept_.emplace_back(std::move(object));
    place.load(std::memory_order_relaxed)
        ->slots[number % kSegment]
        .store(&published, std::memory_order_release);
    if (number >= end_.load(std::memory_order_relaxed))
      end_.store(number + 1, std::memory_order_release);
    return published;
  }
  // Calls f(object) with the last one of each number, in order.
  template <class F>
  void for_each(F&& f) const {
    for (std::uint32_t number = 0, end = this->end(); number < end; ++number) {
      if (T* object = at(number)) f(*object);
    }
  }

 private:
  static constexpr std::uint32_t kSegment = 256;
  struct Segment {
    std::atomic<T*> slots[kSegment]{};
  };
  std::atomic<Segment*> segments_[kMaxSize / kSegment]{};
  std::atomic<std::uint32_t> end_{0};
  Mutex mutex_;
  std::vector<std::unique_ptr<T>> kept_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::base
