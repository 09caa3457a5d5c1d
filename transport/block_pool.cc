#include "stitch/transport/block_pool.h"

#include <sys/mman.h>

#include <algorithm>
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

// Mapped memory aligned to a huge page; the excess around it is unmapped. Null: there is none.
[[nodiscard]] void* map_huge(std::size_t bytes) noexcept {
  const std::size_t mapped = bytes + kHugePage;
  void* const all =
      ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(all);
  const std::size_t before =
      (kHugePage - reinterpret_cast<std::uintptr_t>(begin) % kHugePage) % kHugePage;
  if (before > 0) ::munmap(begin, before);
  ::munmap(begin + before + bytes, kHugePage - before);
  ::madvise(begin + before, bytes, MADV_HUGEPAGE);
  return begin + before;
}

// So many mappings of small blocks at most: a process may have 65530 of any kind, and each hole
// between two blocks makes one more. Further ones are malloc's.
constexpr std::size_t kMaxMappedSmall = 16384;

}  // namespace

BlockPool::BlockPool(std::size_t max_kept_bytes, base::UniqueFunction<void()> trim_later,
                     std::size_t max_bytes)
    : max_kept_bytes_(max_kept_bytes), max_bytes_(max_bytes), trim_later_(std::move(trim_later)) {}

BlockPool::~BlockPool() {
  for (const auto& [bytes, blocks] : unused_) {
    for (const UnusedBlock& each : blocks) to_system(each.block);
  }
}

BlockPool::Block BlockPool::from_system(std::size_t bytes) {
  Block block = try_system(bytes);
  if (block.at == nullptr) {
    static_cast<void>(trim(Clock::time_point::max()));
    block = try_system(bytes);
  }
  if (block.at == nullptr) no_memory(bytes);
  return block;
}

// `bytes` is a block size: a multiple of 4096.
BlockPool::Block BlockPool::try_system(std::size_t bytes) noexcept {
  if (bytes >= kHugePage) return {map_huge(bytes), bytes, true};
  if (mapped_small_.fetch_add(1) < kMaxMappedSmall) {
    void* const at =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at != MAP_FAILED) return {at, bytes, true};
  }
  mapped_small_.fetch_sub(1);
  return {std::aligned_alloc(kPage, bytes), bytes, false};
}

void BlockPool::to_system(const Block& block) noexcept {
  if (!block.mapped) return std::free(block.at);
  ::munmap(block.at, block.bytes);
  if (block.bytes < kHugePage) mapped_small_.fetch_sub(1);
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
  Block block;
  std::vector<Block> dropped;
  {
    base::MutexLock lock(mutex_);
    const auto found = unused_.find(size);
    if (found != unused_.end() && !found->second.empty()) {
      block = found->second.back().block;
      found->second.pop_back();
      statistics_.kept_bytes -= size;
      ++statistics_.reused;
    } else {
      ++statistics_.fresh;
    }
    dropped = use(size);
  }
  for (const Block& each : dropped) to_system(each);
  try {
    if (block.at == nullptr) block = from_system(size);
  } catch (...) {
    base::MutexLock lock(mutex_);
    statistics_.used_bytes -= size;
    throw;
  }
  return Buffer{device, block.at, bytes,
                std::shared_ptr<const void>(
                    block.at,
                    [pool = shared_from_this(), size, mapped = block.mapped](void* at) {
                      pool->give_back({at, size, mapped});
                    },
                    base::RecyclingAllocator<char>())};
}

bool BlockPool::full(std::size_t bytes) const {
  const std::size_t most = std::max({max_bytes_, most_used_, most_used_before_});
  return statistics_.used_bytes + statistics_.kept_bytes + bytes > most;
}

std::vector<BlockPool::Block> BlockPool::use(std::size_t bytes) {
  statistics_.used_bytes += bytes;
  most_used_ = std::max(most_used_, statistics_.used_bytes);
  std::vector<Block> dropped;
  while (statistics_.kept_bytes > 0 && full(0)) {
    std::deque<UnusedBlock>* oldest = nullptr;
    for (auto& [size, blocks] : unused_) {
      if (blocks.empty()) continue;
      if (oldest == nullptr || blocks.front().since < oldest->front().since) oldest = &blocks;
    }
    dropped.push_back(oldest->front().block);
    statistics_.kept_bytes -= dropped.back().bytes;
    oldest->pop_front();
  }
  return dropped;
}

void BlockPool::give_back(const Block& block) noexcept {
  bool first = false;
  bool keep = false;
  {
    base::MutexLock lock(mutex_);
    statistics_.used_bytes -= block.bytes;
    keep = statistics_.kept_bytes + block.bytes <= max_kept_bytes_ && !full(block.bytes);
    if (keep) {
      unused_[block.bytes].push_back({block, Clock::now()});
      first = std::exchange(statistics_.kept_bytes, statistics_.kept_bytes + block.bytes) == 0;
    }
  }
  if (!keep) to_system(block);
  if (first && trim_later_) trim_later_();
}

bool BlockPool::trim(Clock::time_point since) {
  std::vector<Block> dropped;
  bool more = false;
  {
    base::MutexLock lock(mutex_);
    most_used_before_ = std::exchange(most_used_, statistics_.used_bytes);
    for (auto& [bytes, blocks] : unused_) {
      while (!blocks.empty() && blocks.front().since < since) {
        dropped.push_back(blocks.front().block);
        blocks.pop_front();
        statistics_.kept_bytes -= bytes;
      }
    }
    more = statistics_.kept_bytes > 0;
  }
  for (const Block& each : dropped) to_system(each);
  return more;
}

BlockPool::Statistics BlockPool::statistics() const {
  base::MutexLock lock(mutex_);
  return statistics_;
}

}  // namespace stitch::transport
