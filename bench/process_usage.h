#pragma once

#include <utility>

namespace stitch_bench {

// The resident memory (VmRSS) of this process, in MiB. Throws std::runtime_error when /proc does
// not have it.
[[nodiscard]] double resident_mib();
// The number of its threads.
[[nodiscard]] int thread_count();
// Sleeps for `seconds`; returns the CPU time that the process used meanwhile, in % of one core.
[[nodiscard]] double cpu_percent_while_asleep(double seconds);

}  // namespace stitch_bench
