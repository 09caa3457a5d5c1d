#include "allocation_counter.h"

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>

// A program that defines these functions replaces the C library's for all its libraries; glibc
// offers its own under other names for this purpose. Memory is freed by glibc's free().
extern "C" {
void* __libc_malloc(std::size_t bytes);
void* __libc_calloc(std::size_t count, std::size_t bytes);
void* __libc_realloc(void* memory, std::size_t bytes);
void* __libc_memalign(std::size_t alignment, std::size_t bytes);
}

namespace {

constinit std::atomic<bool> counting{false};
constinit std::atomic<std::uint64_t> allocations{0};

void count() noexcept {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

namespace stitch_bench {

void start_counting_allocations() noexcept {
  allocations = 0;
  counting = true;
}

std::uint64_t stop_counting_allocations() noexcept {
  counting = false;
  return allocations;
}

}  // namespace stitch_bench

extern "C" {

void* malloc(std::size_t bytes) noexcept {
  count();
  return __libc_malloc(bytes);
}

void* calloc(std::size_t number, std::size_t bytes) noexcept {
  count();
  return __libc_calloc(number, bytes);
}

void* realloc(void* memory, std::size_t bytes) noexcept {
  count();
  return __libc_realloc(memory, bytes);
}

void* memalign(std::size_t alignment, std::size_t bytes) noexcept {
  count();
  return __libc_memalign(alignment, bytes);
}

void* aligned_alloc(std::size_t alignment, std::size_t bytes) noexcept {
  count();
  return __libc_memalign(alignment, bytes);
}

int posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) noexcept {
  if (alignment == 0 || alignment % sizeof(void*) != 0 || (alignment & (alignment - 1)) != 0)
    return EINVAL;
  count();
  void* const taken = __libc_memalign(alignment, bytes);
  if (taken == nullptr) return ENOMEM;
  *memory = taken;
  return 0;
}

}  // extern "C"
