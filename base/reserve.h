#pragma once

#include <cstddef>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>

#include "stitch/base/recycler.h"

namespace stitch::base {

// Memory for steps that must not fail in the middle: where the heap has none left, a block of a
// reserve of the process that takes none before. What ends things (a reference dropped, a message
// processed, a timer set again) takes the second half of it as well; what begins things calls
// require_reserve() first, and fails while nothing has changed. Thread contract: any thread.

// Throws std::bad_alloc while less than half of the reserve is left. One load.
void require_reserve();
// A block of `bytes` of the reserve. Throws std::bad_alloc if there is none.
[[nodiscard]] void* take_reserved(std::size_t bytes);
// Takes a block back. False if it is not one of the reserve.
bool give_back_reserved(void* at) noexcept;

// From the recycler, or from the reserve; as operator new and delete of a class.
[[nodiscard]] inline void* take_recycled_or_reserved(std::size_t bytes) {
  try {
    return take_recycled(bytes);
  } catch (const std::bad_alloc&) {
    return take_reserved(bytes);
  }
}
inline void recycle_or_give_back(void* at, std::size_t bytes) noexcept {
  if (!give_back_reserved(at)) recycle(at, bytes);
}

// A standard allocator that takes from the reserve where `Heap` has nothing left. Stateless.
template <class T, template <class> class Heap = RecyclingAllocator>
struct ReservedAllocator {
  using value_type = T;
  using is_always_equal = std::true_type;
  template <class U>
  struct rebind {
    using other = ReservedAllocator<U, Heap>;
  };
  ReservedAllocator() noexcept = default;
  template <class U>
  ReservedAllocator(const ReservedAllocator<U, Heap>&) noexcept {
  }  // NOLINT: converts as every allocator
  [[nodiscard]] T* allocate(std::size_t count) {
    try {
      return Heap<T>().allocate(count);
    } catch (const std::bad_array_new_length&) {
      throw;
    } catch (const std::bad_alloc&) {
      return static_cast<T*>(take_reserved(count * sizeof(T)));
    }
  }
  void deallocate(T* at, std::size_t count) noexcept {
    if (!give_back_reserved(at)) Heap<T>().deallocate(at, count);
  }
  template <class U>
  friend bool operator==(const ReservedAllocator&, const ReservedAllocator<U, Heap>&) noexcept {
    return true;
  }
  static_assert(alignof(T) <= 64);
};

}  // namespace stitch::base
