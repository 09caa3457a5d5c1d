#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace stitch_reliability {

// The options of a command line, "--name value" or "--name=value". A plain value.
class Flags {
 public:
  // Throws std::invalid_argument for a word that is no option, or one that is not in `known`.
  Flags(const std::vector<std::string>& words, const std::set<std::string>& known);

  // Each throws std::invalid_argument when the value is not of its kind.
  [[nodiscard]] std::string text(const std::string& name, const std::string& otherwise) const;
  [[nodiscard]] std::vector<std::string> list(const std::string& name,
                                              const std::string& otherwise) const;
  [[nodiscard]] std::int64_t number(const std::string& name, std::int64_t otherwise,
                                    std::int64_t least, std::int64_t most) const;
  // "500ms", "10s", "2m", "1h".
  [[nodiscard]] std::chrono::nanoseconds duration(const std::string& name,
                                                  const std::string& otherwise) const;

 private:
  std::map<std::string, std::string> values_;
};

}  // namespace stitch_reliability
