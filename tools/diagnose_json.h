#pragma once

#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace stitch_run {

// A JSON value, as parse_json() returns it.
struct Json {
  using Array = std::vector<Json>;
  using Object = std::map<std::string, Json, std::less<>>;
  std::variant<std::monostate, bool, double, std::string, Array, Object> value;

  [[nodiscard]] const std::string* text() const { return std::get_if<std::string>(&value); }
  [[nodiscard]] const double* number() const { return std::get_if<double>(&value); }
  [[nodiscard]] const Array* array() const { return std::get_if<Array>(&value); }
  // The member of that name; null for what is no object or has none.
  [[nodiscard]] const Json* member(std::string_view name) const;
};

// What is wrong with a text, and at which byte.
class JsonError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Reads one JSON value from a text of any origin: nested at most 32 deep; memory in proportion to
// the text. Throws JsonError.
[[nodiscard]] Json parse_json(std::string_view text);

}  // namespace stitch_run
