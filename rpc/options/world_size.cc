#include "stitch/rpc/options/options.h"

#include <charconv>
#include <optional>
#include <string_view>

#include "stitch/base/error.h"

namespace stitch {

namespace {

std::optional<int> whole_number(std::string_view text) {
  int value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < 0) return std::nullopt;
  return value;
}

}  // namespace

WorldSize::WorldSize(const std::string& text) {
  const std::string_view view = text;
  const auto colon = view.find(':');
  const auto first = whole_number(view.substr(0, colon));
  const auto last = colon == std::string_view::npos ? first
                    : colon + 1 == view.size()      ? std::optional(kNoLimit)
                                                    : whole_number(view.substr(colon + 1));
  if (!first || !last) {
    throw Error(ErrorCode::invalid_argument,
                "world_size is \"" + text +
                    "\"; allowed: a number such as 4, or a range such as "
                    "2:8 or 2: of an elastic world");
  }
  min_ = *first;
  max_ = *last;
  elastic_ = colon != std::string_view::npos;
}

std::string WorldSize::str() const {
  if (!is_set()) return "unset";
  if (!elastic_) return std::to_string(min_);
  return std::to_string(min_) + ':' + (max_ == kNoLimit ? "" : std::to_string(max_));
}

}  // namespace stitch
