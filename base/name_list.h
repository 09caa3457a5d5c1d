#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace stitch::base {

// The edit distance if it is at most `max`, else some larger number.
[[nodiscard]] std::size_t edit_distance(const std::string& a, const std::string& b,
                                        std::size_t max);

// "a, b, c".
[[nodiscard]] std::string join_names(const std::vector<std::string>& names);

// Drops duplicates. Throws Error(invalid_argument) when there are no names or one is not in
// `known`; `what` is what they name, "transport" for example.
void check_names(const std::string& what, std::vector<std::string>& names,
                 const std::vector<std::string>& known);

// Up to `max` of `names` with the smallest edit distance to `wanted`, nearest first; none of those
// that differ much.
[[nodiscard]] std::vector<std::string> nearest_names(const std::string& wanted,
                                                     std::vector<std::string> names,
                                                     std::size_t max);

}  // namespace stitch::base
