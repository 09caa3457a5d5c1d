#pragma once

#include <utility>

namespace stitch_bench {

// What this process has in memory (VmRSS), in MiB. Throws std::runtime_error when the kernel does
// not say.
[[nodiscard]] double resident_mib();
// How many threads it has.
[[nodiscard]] int thread_count();
// Sleeps for that long; returns the processor time that the process used meanwhile, in % of one
// core.
[[nodiscard]] double cpu_percent_while_asleep(double seconds);

}  // namespace stitch_bench
