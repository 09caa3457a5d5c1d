#pragma once

namespace stitch_bench {

// Restricts this thread, and those it starts from now on, to one core. Throws std::runtime_error
// when that is not allowed.
void pin_to_core(int core);
// True when there are at least two cores to run on.
[[nodiscard]] bool has_two_cores();

}  // namespace stitch_bench
