#pragma once

#include <memory>
#include <string>

namespace stitch_bench {

// What else wants the cores while a measure runs: "idle", nothing; a number, so many processes that
// compute without end; "torch", both processes compute with libtorch's threads, one for each core;
// "pinned", both run on core 0.
[[nodiscard]] bool is_busy_kind(const std::string& kind);
// The processes of a kind that is a number, else 0.
[[nodiscard]] int competitors_of(const std::string& kind);
// What a measured process does for a kind, until the returned object is destroyed.
[[nodiscard]] std::shared_ptr<void> begin_busy(const std::string& kind);
// Computes without end, in a process of its own.
[[noreturn]] void compete();

}  // namespace stitch_bench
