#pragma once

#include <chrono>
#include <optional>
#include <string_view>

namespace stitch::base {

// The time in a text such as "500ms", "1.5s", "2m": a number from 0 on and a unit (us, ms, s, m or
// h), seconds without one. What exceeds the type is its maximum. Nothing for any other text.
[[nodiscard]] std::optional<std::chrono::nanoseconds> parse_duration(std::string_view text);

}  // namespace stitch::base
