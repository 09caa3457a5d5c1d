#include "flags.h"

#include <cctype>
#include <charconv>
#include <sstream>
#include <stdexcept>

#include "stitch/base/parse_duration.h"

namespace stitch_reliability {

Flags::Flags(const std::vector<std::string>& words, const std::set<std::string>& known) {
  for (std::size_t i = 0; i < words.size(); ++i) {
    std::string name = words[i];
    std::string value;
    if (const auto equals = name.find('='); equals != std::string::npos) {
      value = name.substr(equals + 1);
      name.resize(equals);
    } else if (i + 1 < words.size()) {
      value = words[++i];
    }
    if (!name.starts_with("--") || !known.contains(name.substr(2)) || value.empty())
      throw std::invalid_argument("option \"" + name +
                                  "\" is unknown or needs a value; see --help");
    values_[name.substr(2)] = value;
  }
}

std::string Flags::text(const std::string& name, const std::string& otherwise) const {
  const auto found = values_.find(name);
  return found == values_.end() ? otherwise : found->second;
}

std::vector<std::string> Flags::list(const std::string& name, const std::string& otherwise) const {
  std::vector<std::string> parts;
  std::istringstream stream(text(name, otherwise));
  for (std::string part; std::getline(stream, part, ',');) {
    if (!part.empty()) parts.push_back(part);
  }
  return parts;
}

std::int64_t Flags::number(const std::string& name, std::int64_t otherwise, std::int64_t least,
                           std::int64_t most) const {
  const auto found = values_.find(name);
  if (found == values_.end()) return otherwise;
  const std::string& value = found->second;
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() || number < least ||
      number > most) {
    throw std::invalid_argument("--" + name + " is \"" + value + "\"; it takes a number from " +
                                std::to_string(least) + " to " + std::to_string(most));
  }
  return number;
}

std::chrono::nanoseconds Flags::duration(const std::string& name,
                                         const std::string& otherwise) const {
  const std::string value = text(name, otherwise);
  const auto duration = stitch::base::parse_duration(value);
  const bool has_unit = !value.empty() && std::isalpha(static_cast<unsigned char>(value.back()));
  if (!has_unit || !duration || *duration > std::chrono::hours(24 * 365)) {
    throw std::invalid_argument("--" + name + " is \"" + value +
                                "\"; it takes a time such as 500ms, 10s, 2m or 1h");
  }
  return *duration;
}

}  // namespace stitch_reliability
