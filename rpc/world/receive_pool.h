#pragma once

#include <cstddef>
#include <memory>

#include "stitch/base/event_loop.h"
#include "stitch/transport/block_pool.h"

namespace stitch::rpc {

// A pool for the memory of received tensors. Blocks that have been unused for two seconds are
// returned to the system, by a timer of `loop` that runs only while there are unused blocks. At
// most `max_kept_bytes` are kept. The pool may outlive the loop: then nothing is returned any more.
[[nodiscard]] std::shared_ptr<transport::BlockPool> make_receive_pool(
    std::size_t max_kept_bytes, const std::shared_ptr<base::EventLoop>& loop);

}  // namespace stitch::rpc
