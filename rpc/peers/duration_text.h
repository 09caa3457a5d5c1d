#pragma once

#include <chrono>
#include <string>

namespace stitch::rpc {

// "4.9 s", "120 ms".
[[nodiscard]] std::string duration_text(std::chrono::nanoseconds duration);

}  // namespace stitch::rpc
