#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

#include "stitch/base/event_loop.h"
#include "stitch/transport/block_pool.h"

namespace stitch::transport {

inline constexpr std::chrono::seconds kUnusedBlockTime{2};

// A BlockPool whose blocks go back to the system once they have been unused for `unused_for`, by a
// timer of `loop` that runs only while there are such blocks. Neither keeps the other alive. Thread
// contract: any thread.
[[nodiscard]] std::shared_ptr<BlockPool> make_trimmed_pool(
    std::size_t max_kept_bytes, const std::shared_ptr<base::EventLoop>& loop,
    std::chrono::milliseconds unused_for = kUnusedBlockTime,
    std::size_t max_bytes = BlockPool::kUnlimited);

}  // namespace stitch::transport
