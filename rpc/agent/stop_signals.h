#pragma once

#include <chrono>
#include <optional>

// SIGTERM and SIGINT as a request to stop, in programs that ask for it (Options::stop_on_signals).
// Thread contract: any thread.
namespace stitch::rpc {

// Takes both signals; a second one of the same kind ends the process as without this. An ignored
// signal stays ignored. Throws Error(invalid_argument) where the program has its own handler.
void take_stop_signals();
[[nodiscard]] bool stop_signals_taken() noexcept;
// When the first of them came; nothing before.
[[nodiscard]] std::optional<std::chrono::steady_clock::time_point> stop_requested_at() noexcept;
// Waits for that. Throws Error(invalid_argument) where take_stop_signals() was never called.
void await_stop_signal();

}  // namespace stitch::rpc
