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

// Memory for large received buffers, kept for the next ones: on a fresh page the kernel spends more
// time than the transfer does. Blocks come in sizes that are at most a quarter apart; those of 2
// MiB and more are laid out for huge pages. A block returns when the last copy of its Buffer goes,
// wherever that is, and is given back to the system when it has lain unused for a while. Shared by
// an endpoint and by every buffer that is still in use. Thread contract: any thread. No lock is
// held while `trim_later` is called.
class BlockPool : public std::enable_shared_from_this<BlockPool> {
 public:
  using Clock = std::chrono::steady_clock;
  // Keeps at most `most_kept_bytes` of unused blocks; 0: none. `trim_later` is called when the
  // first block comes to lie unused: trim() is wanted some time after (empty: never).
  BlockPool(std::size_t most_kept_bytes, base::UniqueFunction<void()> trim_later);
  ~BlockPool();
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // As an Allocator: uninitialised memory aligned to 64. Below kSmallest from the heap.
  [[nodiscard]] Buffer allocate(Device device, std::size_t bytes) STITCH_EXCLUDES(mutex_);
  // Gives back what was last used before `since`. True when something is still kept: to be called
  // again.
  bool trim(Clock::time_point since) STITCH_EXCLUDES(mutex_);

  struct Statistics {
    std::size_t kept_bytes = 0;  // unused
    std::size_t used_bytes = 0;  // in buffers
    std::uint64_t reused = 0;    // how often a kept block served
    std::uint64_t fresh = 0;     // and how often the system had to
  };
  [[nodiscard]] Statistics statistics() const STITCH_EXCLUDES(mutex_);

  static constexpr std::size_t kSmallest = std::size_t{64} << 10;
  // What a request for `bytes` takes.
  [[nodiscard]] static std::size_t block_bytes(std::size_t bytes) noexcept;

 private:
  struct Kept {
    void* at = nullptr;
    Clock::time_point since;
  };
  void give_back(void* at, std::size_t bytes) noexcept STITCH_EXCLUDES(mutex_);

  const std::size_t most_kept_bytes_;
  base::UniqueFunction<void()> trim_later_;
  mutable base::Mutex mutex_;
  std::map<std::size_t, std::vector<Kept>> kept_
      STITCH_GUARDED_BY(mutex_);  // by size; the last one is the warmest
  Statistics statistics_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::transport
