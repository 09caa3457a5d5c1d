#pragma once

#include <string_view>

namespace stitch {

// Whether this deliberate mistake is turned on, in the copies of sources that mutate.cmake makes.
[[nodiscard]] bool mistake(std::string_view name) noexcept;

}  // namespace stitch
