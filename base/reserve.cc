#include "stitch/base/reserve.h"

#include <array>
#include <atomic>
#include <cstdint>

#include "stitch/base/mutex.h"

namespace stitch::base {

namespace {

struct Kind {
  std::size_t bytes;  // of a block
  std::size_t count;
};
constexpr std::array<Kind, 3> kKinds{{{128, 1024}, {512, 512}, {4096, 64}}};
constexpr std::size_t kBytes = [] {
  std::size_t bytes = 0;
  for (const Kind& each : kKinds) bytes += each.bytes * each.count;
  return bytes;
}();

// Pages that no block has been taken from take no memory.
alignas(64) constinit std::array<std::byte, kBytes> storage{};

struct Free {
  Free* next;
};
struct Blocks {
  Mutex mutex;
  std::array<Free*, kKinds.size()> free STITCH_GUARDED_BY(mutex){};         // given back
  std::array<std::size_t, kKinds.size()> begun STITCH_GUARDED_BY(mutex){};  // blocks ever taken
};
constinit Blocks all;
constinit std::atomic<std::size_t> taken_bytes{0};

}  // namespace

void require_reserve() {
  if (taken_bytes.load(std::memory_order_relaxed) > kBytes / 2) throw std::bad_alloc();
}

void* take_reserved(std::size_t bytes) {
  const MutexLock lock(all.mutex);
  std::size_t begin = 0;
  for (std::size_t i = 0; i < kKinds.size(); ++i) {
    const Kind& kind = kKinds[i];
    void* at = nullptr;
    if (bytes <= kind.bytes) {
      if (all.free[i] != nullptr) {
        at = all.free[i];
        all.free[i] = all.free[i]->next;
      } else if (all.begun[i] < kind.count) {
        at = storage.data() + begin + kind.bytes * all.begun[i]++;
      }
    }
    if (at != nullptr) {
      taken_bytes.fetch_add(kind.bytes, std::memory_order_relaxed);
      return at;
    }
    begin += kind.bytes * kind.count;
  }
  throw std::bad_alloc();
}

bool give_back_reserved(void* at) noexcept {
  // Compared as numbers: most blocks are of the heap.
  const auto offset =
      reinterpret_cast<std::uintptr_t>(at) - reinterpret_cast<std::uintptr_t>(storage.data());
  if (offset >= kBytes) [[likely]]
    return false;
  std::size_t begin = 0;
  std::size_t i = 0;
  while (offset >= begin + kKinds[i].bytes * kKinds[i].count) {
    begin += kKinds[i].bytes * kKinds[i].count;
    ++i;
  }
  const MutexLock lock(all.mutex);
  all.free[i] = ::new (at) Free{all.free[i]};
  taken_bytes.fetch_sub(kKinds[i].bytes, std::memory_order_relaxed);
  return true;
}

}  // namespace stitch::base
