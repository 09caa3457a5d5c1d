#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"
#include "stitch/transport/wire/buffer.h"

namespace stitch::transport {

// Memory for large received buffers, reused for the next ones: faulting in fresh pages takes longer
// than the transfer itself. Block sizes are at most a quarter apart; those of 2 MiB and more are
// aligned for huge pages. A block returns to the pool when the last copy of its Buffer is
// destroyed, on whatever thread, and to the system by trim(). Shared by an endpoint and by every
// buffer that is in use. Thread contract: any thread. No lock is held while `trim_later` is called.
class BlockPool : public std::enable_shared_from_this<BlockPool> {
 public:
  using Clock = std::chrono::steady_clock;
  // Keeps at most `max_kept_bytes` of unused blocks; 0: none. `trim_later` is called when the pool
  // gets its first unused block: trim() should be called some time later (empty: never).
  BlockPool(std::size_t max_kept_bytes, base::UniqueFunction<void()> trim_later);
  ~BlockPool();
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // As an Allocator: uninitialised memory aligned to 64. Below kSmallest from the heap.
  [[nodiscard]] Buffer allocate(Device device, std::size_t bytes) STITCH_EXCLUDES(mutex_);
  // Frees blocks that have been unused since before `since`. True when unused blocks remain: to be
  // called again.
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
  struct Kept {
    void* at = nullptr;
    Clock::time_point since;
  };
  void give_back(void* at, std::size_t bytes) noexcept STITCH_EXCLUDES(mutex_);

  const std::size_t max_kept_bytes_;
  base::UniqueFunction<void()> trim_later_;
  mutable base::Mutex mutex_;
  std::map<std::size_t, std::vector<Kept>> kept_
      STITCH_GUARDED_BY(mutex_);  // by size; the last was used last
  Statistics statistics_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::transport
