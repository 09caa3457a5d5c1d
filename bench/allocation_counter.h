#pragma once

#include <cstdint>

namespace stitch_bench {

// Counts the heap allocations of this process while counting is on, of all libraries and threads:
// malloc, calloc, realloc, the aligned ones, and so operator new. When off it costs one load per
// call. Thread contract: any thread.
void start_counting_allocations() noexcept;
// Stops; returns the number since the start.
[[nodiscard]] std::uint64_t stop_counting_allocations() noexcept;

}  // namespace stitch_bench
