#include "stitch/base/parse_duration.h"

#include <array>
#include <charconv>
#include <cstdint>
#include <system_error>
#include <utility>

namespace stitch::base {

std::optional<std::chrono::nanoseconds> parse_duration(std::string_view text) {
  static constexpr std::array<std::pair<std::string_view, double>, 6> kUnits{
      {{"us", 1e3}, {"ms", 1e6}, {"s", 1e9}, {"m", 6e10}, {"h", 3.6e12}, {"", 1e9}}};
  double number = 0;
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, number);
  if (error != std::errc() || !(number >= 0)) return std::nullopt;
  const std::string_view unit(end, static_cast<std::size_t>(last - end));
  for (const auto& [name, nanoseconds] : kUnits) {
    if (unit != name) continue;
    if (number * nanoseconds > 9e18) return std::chrono::nanoseconds::max();
    return std::chrono::nanoseconds(static_cast<std::int64_t>(number * nanoseconds));
  }
  return std::nullopt;
}

}  // namespace stitch::base
