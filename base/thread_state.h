#pragma once

#include <string>

namespace stitch::base {

// What a thread of this process does at the moment, as far as the system says: "computes",
// "waits for a lock or a condition", "sleeps", "reads", "waits for input", "waits for a process",
// "is blocked in system call 17"; empty if there is no such thread. For reports. Any thread.
[[nodiscard]] std::string thread_state(int thread);

// The name that a thread of this process has given itself; empty if there is no such thread.
[[nodiscard]] std::string thread_name(int thread);

}  // namespace stitch::base
