#include "stitch/base/recycler.h"

#include <array>
#include <bit>
#include <utility>

#include "stitch/base/mutex.h"

// The sanitizers watch memory that is freed: under them nothing is recycled.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define STITCH_RECYCLES 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define STITCH_RECYCLES 0
#endif
#endif
#ifndef STITCH_RECYCLES
#define STITCH_RECYCLES 1
#endif

namespace stitch::base {

namespace {

constexpr std::size_t kSmallest = 64;
constexpr std::size_t kClasses = 7;  // 64, 128, ... 4096
constexpr std::size_t kBatch = 32;   // moved between a thread's list and the shared one
constexpr std::align_val_t kAlignment{64};

[[nodiscard]] constexpr std::size_t class_of(std::size_t bytes) noexcept {
  return bytes <= kSmallest ? 0 : static_cast<std::size_t>(std::bit_width((bytes - 1) / kSmallest));
}
static_assert(class_of(64) == 0 && class_of(65) == 1 && class_of(128) == 1 &&
              class_of(4096) == kClasses - 1);
[[nodiscard]] constexpr std::size_t bytes_of(std::size_t size_class) noexcept {
  return kSmallest << size_class;
}

[[nodiscard]] void* from_heap(std::size_t bytes) { return ::operator new(bytes, kAlignment); }
void to_heap(void* at) noexcept { ::operator delete(at, kAlignment); }

// A free block; the first of a batch also leads to the next batch.
struct Block {
  Block* next;
  Block* next_batch;
};
static_assert(sizeof(Block) <= kSmallest);

void free_all(Block* block) noexcept {
  while (block != nullptr) to_heap(std::exchange(block, block->next));
}

// The shared lists. Never destroyed: threads may end after static objects.
class Depot {
 public:
  // A batch of `kBatch` blocks; null when there is none.
  [[nodiscard]] Block* take(std::size_t size_class) {
    MutexLock lock(mutex_);
    Shelf& shelf = shelves_[size_class];
    Block* const batch = shelf.batches;
    if (batch == nullptr) return nullptr;
    shelf.batches = batch->next_batch;
    --shelf.count;
    return batch;
  }
  void give(std::size_t size_class, Block* batch) noexcept {
    {
      MutexLock lock(mutex_);
      Shelf& shelf = shelves_[size_class];
      if ((shelf.count + 1) * kBatch * bytes_of(size_class) <= kKeptBytes) {
        batch->next_batch = shelf.batches;
        shelf.batches = batch;
        ++shelf.count;
        return;
      }
    }
    free_all(batch);
  }

 private:
  struct Shelf {
    Block* batches = nullptr;
    std::size_t count = 0;
  };
  Mutex mutex_;
  std::array<Shelf, kClasses> shelves_ STITCH_GUARDED_BY(mutex_);
};

Depot& depot() {
  static auto* const it = new Depot;
  return *it;
}

// A thread's own lists: up to two batches of each size.
class Cache {
 public:
  ~Cache() {
    for (Shelf& shelf : shelves_) {
      free_all(shelf.first);
      free_all(shelf.second);
    }
    gone = true;
  }
  [[nodiscard]] void* take(std::size_t size_class) {
    Shelf& shelf = shelves_[size_class];
    if (shelf.first == nullptr) {
      if (shelf.second != nullptr) {
        shelf.first = std::exchange(shelf.second, nullptr);
        shelf.count = kBatch;
      } else {
        shelf.first = depot().take(size_class);
        shelf.count = shelf.first == nullptr ? 0 : kBatch;
      }
      if (shelf.first == nullptr) return from_heap(bytes_of(size_class));
    }
    --shelf.count;
    return std::exchange(shelf.first, shelf.first->next);
  }
  void give(std::size_t size_class, void* at) noexcept {
    Shelf& shelf = shelves_[size_class];
    if (shelf.count == kBatch) {
      if (shelf.second != nullptr) depot().give(size_class, shelf.second);
      shelf.second = std::exchange(shelf.first, nullptr);
      shelf.count = 0;
    }
    shelf.first = ::new (at) Block{shelf.first, nullptr};
    ++shelf.count;
  }
  static thread_local bool gone;  // the thread is ending: its lists have been freed

 private:
  struct Shelf {
    Block* first = nullptr;   // `count` blocks
    Block* second = nullptr;  // a full batch, or none
    std::size_t count = 0;
  };
  std::array<Shelf, kClasses> shelves_;
};
thread_local bool Cache::gone = false;
thread_local Cache cache;

}  // namespace

std::size_t recycled_capacity(std::size_t bytes) noexcept {
  return !STITCH_RECYCLES || bytes > kMaxRecycledBytes ? bytes : bytes_of(class_of(bytes));
}

void* take_recycled(std::size_t bytes) {
  if (!STITCH_RECYCLES || bytes > kMaxRecycledBytes) return from_heap(bytes);
  const std::size_t size_class = class_of(bytes);
  return Cache::gone ? from_heap(bytes_of(size_class)) : cache.take(size_class);
}

void recycle(void* at, std::size_t bytes) noexcept {
  if (!STITCH_RECYCLES || bytes > kMaxRecycledBytes || Cache::gone) {
    to_heap(at);
  } else {
    cache.give(class_of(bytes), at);
  }
}

}  // namespace stitch::base
