#pragma once

#include <string>
#include <vector>

namespace stitch::base {

// "a, b, c".
[[nodiscard]] std::string join_names(const std::vector<std::string>& names);

// Drops repeated names. Throws Error(invalid_argument) when there are none or when one is not in
// `known`; `what` says what they name.
void check_names(const std::string& what, std::vector<std::string>& names,
                 const std::vector<std::string>& known);

// Up to `most` of `names` that differ least from `wanted`, nearest first.
[[nodiscard]] std::vector<std::string> nearest_names(const std::string& wanted,
                                                     std::vector<std::string> names,
                                                     std::size_t most);

}  // namespace stitch::base
