#include "stitch/transport/block_pool.h"

#include <sys/mman.h>

#include <bit>
#include <cstdlib>
#include <limits>
#include <string>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/base/recycler.h"

namespace stitch::transport {

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kPage = 4096;
static_assert(BlockPool::kSmallest / 4 >= kPage);

[[noreturn]] void no_memory(std::size_t bytes) {
  throw Error(ErrorCode::overloaded,
              "buffer of " + std::to_string(bytes) + " bytes cannot be allocated: out of memory");
}

// Mapped memory aligned to a huge page; the excess around it is unmapped.
[[nodiscard]] void* map_huge(std::size_t bytes) {
  const std::size_t mapped = bytes + kHugePage;
  void* const all =
      ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) no_memory(bytes);
  auto* const begin = static_cast<std::byte*>(all);
  const std::size_t before =
      (kHugePage - reinterpret_cast<std::uintptr_t>(begin) % kHugePage) % kHugePage;
  if (before > 0) ::munmap(begin, before);
  ::munmap(begin + before + bytes, kHugePage - before);
  ::madvise(begin + before, bytes, MADV_HUGEPAGE);
  return begin + before;
}

// `bytes` is a block size: a multiple of 4096 from a huge page on.
[[nodiscard]] void* from_system(std::size_t bytes) {
  if (bytes >= kHugePage) return map_huge(bytes);
  void* const at = std::aligned_alloc(kPage, bytes);
  if (at == nullptr) no_memory(bytes);
  return at;
}

void to_system(void* at, std::size_t bytes) noexcept {
  if (bytes >= kHugePage) {
    ::munmap(at, bytes);
  } else {
    std::free(at);
  }
}

}  // namespace

BlockPool::BlockPool(std::size_t max_kept_bytes, base::UniqueFunction<void()> trim_later)
    : max_kept_bytes_(max_kept_bytes), trim_later_(std::move(trim_later)) {}

BlockPool::~BlockPool() {
  for (auto& [bytes, blocks] : kept_) {
    for (const Kept& each : blocks) to_system(each.at, bytes);
  }
}

std::size_t BlockPool::block_bytes(std::size_t bytes) noexcept {
  if (bytes <= kSmallest) return kSmallest;
  // Four steps from one power of two to the next.
  const std::size_t step = std::bit_floor(bytes - 1) / 4;
  return (bytes + step - 1) / step * step;
}

Buffer BlockPool::allocate(Device device, std::size_t bytes) {
  if (device != Device{} || bytes < kSmallest) return allocate_buffer(device, bytes);
  if (bytes > std::numeric_limits<std::size_t>::max() / 4) no_memory(bytes);
  const std::size_t size = block_bytes(bytes);
  void* at = nullptr;
  {
    base::MutexLock lock(mutex_);
    const auto found = kept_.find(size);
    if (found != kept_.end() && !found->second.empty()) {
      at = found->second.back().at;
      found->second.pop_back();
      statistics_.kept_bytes -= size;
      ++statistics_.reused;
    } else {
      ++statistics_.fresh;
    }
    statistics_.used_bytes += size;
  }
  try {
    if (at == nullptr) at = from_system(size);
  } catch (...) {
    base::MutexLock lock(mutex_);
    statistics_.used_bytes -= size;
    throw;
  }
  return Buffer{
      device, at, bytes,
      std::shared_ptr<const void>(
          at, [pool = shared_from_this(), size](void* block) { pool->give_back(block, size); },
          base::RecyclingAllocator<char>())};
}

void BlockPool::give_back(void* at, std::size_t bytes) noexcept {
  bool first = false;
  bool keep = false;
  {
    base::MutexLock lock(mutex_);
    statistics_.used_bytes -= bytes;
    keep = statistics_.kept_bytes + bytes <= max_kept_bytes_;
    if (keep) {
      try {
        kept_[bytes].push_back({at, Clock::now()});
        first = std::exchange(statistics_.kept_bytes, statistics_.kept_bytes + bytes) == 0;
      } catch (const std::bad_alloc&) {
        keep = false;
      }
    }
  }
  if (!keep) to_system(at, bytes);
  if (first && trim_later_) trim_later_();
}

bool BlockPool::trim(Clock::time_point since) {
  std::vector<std::pair<void*, std::size_t>> dropped;
  bool more = false;
  {
    base::MutexLock lock(mutex_);
    for (auto& [bytes, blocks] : kept_) {
      std::size_t old = 0;
      while (old < blocks.size() && blocks[old].since < since)
        dropped.emplace_back(blocks[old++].at, bytes);
      blocks.erase(blocks.begin(), blocks.begin() + static_cast<std::ptrdiff_t>(old));
      statistics_.kept_bytes -= old * bytes;
    }
    more = statistics_.kept_bytes > 0;
  }
  for (const auto& [at, bytes] : dropped) to_system(at, bytes);
  return more;
}

BlockPool::Statistics BlockPool::statistics() const {
  base::MutexLock lock(mutex_);
  return statistics_;
}

}  // namespace stitch::transport
