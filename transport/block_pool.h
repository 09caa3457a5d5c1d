#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"
#include "stitch/transport/wire/buffer.h"

namespace stitch::transport {

// Memory for large received buffers, reused for the next ones: faulting in fresh pages takes longer
// than the transfer itself. Block sizes are at most a quarter apart; those of 2 MiB and more are
// aligned for huge pages. Blocks are mapped, not malloc's: it would keep what is freed in the arena
// of each thread that has ever received. A block returns to the pool when the last copy of its
// Buffer is destroyed, on whatever thread, and to the system by trim(), or when a block of another
// size is needed and the pool is full. Shared by an endpoint and by every buffer that is in use.
// Thread contract: any thread. No lock is held while `trim_later` is called.
class BlockPool : public std::enable_shared_from_this<BlockPool> {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();
  // Keeps at most `max_kept_bytes` of unused blocks; 0: none. Together with those in use they take
  // no more than `max_bytes`, or than those in use have taken lately. `trim_later` is called when
  // the pool gets its first unused block: trim() should be called some time later (empty: never).
  BlockPool(std::size_t max_kept_bytes, base::UniqueFunction<void()> trim_later,
            std::size_t max_bytes = kUnlimited);
  ~BlockPool();

  // As an Allocator: uninitialised memory aligned to 64. Below kSmallest from the heap. Where the
  // system has none, the unused blocks go back to it first. Throws Error(overloaded).
  [[nodiscard]] Buffer allocate(Device device, std::size_t bytes) STITCH_EXCLUDES(mutex_);
  // Frees blocks that have been unused since before `since`. True when unused blocks remain: to be
  // called again. "Lately" is since the call before the last.
  bool trim(Clock::time_point since) STITCH_EXCLUDES(mutex_);

  struct Statistics {
    std::size_t kept_bytes = 0;  // unused
    std::size_t used_bytes = 0;  // in buffers
    std::uint64_t reused = 0;    // allocations served by an unused block
    std::uint64_t fresh = 0;     // allocations that needed memory of the system
  };
  [[nodiscard]] Statistics statistics() const STITCH_EXCLUDES(mutex_);

  static constexpr std::size_t kSmallest = std::size_t{64} << 10;
  // The block size for a request of `bytes`.
  [[nodiscard]] static std::size_t block_bytes(std::size_t bytes) noexcept;

 private:
  // Memory of the system.
  struct Block {
    void* at = nullptr;
    std::size_t bytes = 0;
    bool mapped = false;
  };
  struct UnusedBlock {
    Block block;
    Clock::time_point since;
  };
  [[nodiscard]] Block from_system(std::size_t bytes);
  // Nothing where there is no memory.
  [[nodiscard]] Block try_system(std::size_t bytes) noexcept;
  void to_system(const Block& block) noexcept;
  void give_back(const Block& block) noexcept STITCH_EXCLUDES(mutex_);
  // Counts `bytes` as in use; takes out the unused blocks that are too many then.
  [[nodiscard]] std::vector<Block> use(std::size_t bytes) STITCH_REQUIRES(mutex_);
  [[nodiscard]] bool full(std::size_t bytes) const STITCH_REQUIRES(mutex_);

  const std::size_t max_kept_bytes_;
  const std::size_t max_bytes_;
  base::UniqueFunction<void()> trim_later_;
  std::atomic<std::size_t> mapped_small_{0};  // blocks below a huge page
  mutable base::Mutex mutex_;
  std::map<std::size_t, std::deque<UnusedBlock>> unused_
      STITCH_GUARDED_BY(mutex_);                         // by size; the last was used last
  std::size_t most_used_ STITCH_GUARDED_BY(mutex_) = 0;  // bytes, since the last trim()
  std::size_t most_used_before_ STITCH_GUARDED_BY(mutex_) = 0;
  Statistics statistics_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::transport
