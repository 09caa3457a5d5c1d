#pragma once

#include <cstdint>

namespace stitch_bench {

// Counts what is taken from the heap in this process while counting is on, by whatever library and
// thread: malloc, calloc, realloc, the aligned ones, and so operator new. Off, it costs one load a
// call. Thread contract: any thread.
void start_counting_allocations() noexcept;
// Stops; returns the number since the start.
[[nodiscard]] std::uint64_t stop_counting_allocations() noexcept;

}  // namespace stitch_bench
