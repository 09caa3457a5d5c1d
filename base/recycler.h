#pragma once

#include <cstddef>
#include <limits>
#include <new>

namespace stitch::base {

// Memory for small short-lived objects that one thread makes and another frees, aligned to 64:
// freed blocks are kept in free lists by size, per thread and shared, at most kKeptBytes of each
// size. Any thread, also while it ends.
[[nodiscard]] void* take_recycled(std::size_t bytes);
void recycle(void* at, std::size_t bytes) noexcept;
// Blocks above this size come from the heap and go back to it.
inline constexpr std::size_t kMaxRecycledBytes = 4096;
inline constexpr std::size_t kKeptBytes = std::size_t{1} << 20;
// The usable size of a block of `bytes`.
[[nodiscard]] std::size_t recycled_capacity(std::size_t bytes) noexcept;

// A standard allocator over these blocks. Stateless.
template <class T>
struct RecyclingAllocator {
  using value_type = T;
  RecyclingAllocator() noexcept = default;
  template <class U>
  RecyclingAllocator(const RecyclingAllocator<U>&) noexcept {
  }  // NOLINT: converts as every allocator
  [[nodiscard]] T* allocate(std::size_t count) {
    if (count > std::numeric_limits<std::size_t>::max() / sizeof(T))
      throw std::bad_array_new_length();
    return static_cast<T*>(take_recycled(count * sizeof(T)));
  }
  void deallocate(T* at, std::size_t count) noexcept { recycle(at, count * sizeof(T)); }
  template <class U>
  friend bool operator==(const RecyclingAllocator&, const RecyclingAllocator<U>&) noexcept {
    return true;
  }
  static_assert(alignof(T) <= 64);
};

}  // namespace stitch::base
