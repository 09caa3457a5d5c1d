#pragma once

#include <chrono>

#include "stitch/base/unique_function.h"

namespace stitch::rpc {

// Runs `task` on a thread of its own and waits for it until `deadline`. True when the task has
// returned and been destroyed; otherwise its thread is left to finish alone, so the task must own
// what it uses. Where no thread can be created, the task runs here however long it takes. It must
// not throw. Thread contract: any thread.
[[nodiscard]] bool run_until(std::chrono::steady_clock::time_point deadline,
                             base::UniqueFunction<void()> task);

}  // namespace stitch::rpc
