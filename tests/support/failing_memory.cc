#include "tests/support/failing_memory.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#include "stitch/base/recycler.h"

namespace stitch::testing {

namespace {

constexpr std::int64_t kOff = std::numeric_limits<std::int64_t>::min();
constexpr int kFrames = 48;

std::atomic<std::int64_t> first_fails{0};
std::atomic<std::int64_t> last_fails{kOff};  // kOff: none
std::atomic<std::int64_t> seen{0};
std::atomic<std::int64_t> failed{0};
void* frames[kFrames];
std::atomic<int> frames_known{0};

// Whether what needs the memory is a destructor of libtorch that ends the process without it.
bool must_not_fail(void* const* callers, int count) noexcept {
  for (int i = 0; i < count; ++i) {
    Dl_info where;
    if (::dladdr(callers[i], &where) == 0 || where.dli_sname == nullptr) continue;
    if (std::strstr(where.dli_sname, "deleteNode") != nullptr) return true;
  }
  return false;
}

bool fails() noexcept {
  const std::int64_t last = last_fails.load(std::memory_order_relaxed);
  if (last == kOff || UnfailingMemory::on_this_thread()) return false;
  const std::int64_t number = seen.fetch_add(1) + 1;
  if (number < first_fails.load() || number > last) return false;
  const UnfailingMemory own;
  void* callers[kFrames];  // of this thread: others may fail at the same time
  const int count = ::backtrace(callers, kFrames);
  failed.fetch_add(1);
  if (must_not_fail(callers, count)) return false;
  frames_known = 0;
  std::copy_n(callers, count, frames);
  frames_known = count;
  if (std::getenv("FAILING_MEMORY_TRACE") != nullptr) FailingMemory::print_where();
  return true;
}

void* take(std::size_t bytes, std::size_t alignment) noexcept {
  if (fails()) return nullptr;
  if (bytes == 0) bytes = 1;
  if (alignment <= alignof(std::max_align_t)) return std::malloc(bytes);
  void* at = nullptr;
  return ::posix_memalign(&at, alignment, bytes) == 0 ? at : nullptr;
}

void* take_or_throw(std::size_t bytes, std::size_t alignment) {
  if (void* const at = take(bytes, alignment)) return at;
  throw std::bad_alloc();
}

}  // namespace

void FailingMemory::begin(std::int64_t first, std::int64_t count) noexcept {
  const UnfailingMemory own;
  void* warm[1];
  static_cast<void>(::backtrace(warm, 1));  // loads what it needs
  seen = 0;
  failed = 0;
  first_fails = first;
  last_fails = first + count - 1;
}

std::int64_t FailingMemory::end() noexcept {
  last_fails = kOff;
  return failed;
}

void FailingMemory::print_where() noexcept {
  ::backtrace_symbols_fd(frames, frames_known, STDERR_FILENO);
}

}  // namespace stitch::testing

using stitch::testing::take;
using stitch::testing::take_or_throw;

void* operator new(std::size_t bytes) { return take_or_throw(bytes, 1); }
void* operator new[](std::size_t bytes) { return take_or_throw(bytes, 1); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return take_or_throw(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return take_or_throw(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return take(bytes, 1); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return take(bytes, 1); }
void* operator new(std::size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return take(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment,
                     const std::nothrow_t&) noexcept {
  return take(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* at) noexcept { std::free(at); }
void operator delete[](void* at) noexcept { std::free(at); }
void operator delete(void* at, std::size_t) noexcept { std::free(at); }
void operator delete[](void* at, std::size_t) noexcept { std::free(at); }
void operator delete(void* at, std::align_val_t) noexcept { std::free(at); }
void operator delete[](void* at, std::align_val_t) noexcept { std::free(at); }
void operator delete(void* at, std::size_t, std::align_val_t) noexcept { std::free(at); }
void operator delete[](void* at, std::size_t, std::align_val_t) noexcept { std::free(at); }
void operator delete(void* at, const std::nothrow_t&) noexcept { std::free(at); }
void operator delete[](void* at, const std::nothrow_t&) noexcept { std::free(at); }
void operator delete(void* at, std::align_val_t, const std::nothrow_t&) noexcept { std::free(at); }
void operator delete[](void* at, std::align_val_t, const std::nothrow_t&) noexcept {
  std::free(at);
}

// In place of base::take_recycled() and base::recycle(), by the linker: each block is an allocation
// then.
extern "C" {
void* __wrap__ZN6stitch4base13take_recycledEm(std::size_t bytes) {
  return ::operator new (stitch::base::recycled_capacity(bytes), std::align_val_t{64});
}
void __wrap__ZN6stitch4base7recycleEPvm(void* at, std::size_t) noexcept {
  ::operator delete (at, std::align_val_t{64});
}
}
