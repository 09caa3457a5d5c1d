#pragma once

#include <chrono>

#include "stitch/base/unique_function.h"

namespace stitch::rpc {

// Runs `task`, which owns what it uses and throws nothing, on a thread of its own and waits for it
// until `deadline`. False: its thread is left to finish alone. Without a thread the task runs here
// however long it takes. Any thread.
[[nodiscard]] bool run_until(std::chrono::steady_clock::time_point deadline,
                             base::UniqueFunction<void()> task);

}  // namespace stitch::rpc
