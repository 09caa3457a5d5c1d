#include "stitch/base/name_list.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "stitch/base/error.h"

namespace stitch::base {

std::size_t edit_distance(const std::string& a, const std::string& b, std::size_t max) {
  if (std::max(a.size(), b.size()) - std::min(a.size(), b.size()) > max) return max + 1;
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, change}));
    }
  }
  return row.back();
}

namespace {

[[nodiscard]] std::string without_scope(const std::string& name) {
  const auto at = name.rfind("::", name.find('<'));  // not inside template arguments
  return at == std::string::npos ? name : name.substr(at + 2);
}

}  // namespace

std::string join_names(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

void check_names(const std::string& what, std::vector<std::string>& names,
                 const std::vector<std::string>& known) {
  std::vector<std::string> unique;
  for (const std::string& name : names) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      throw Error(ErrorCode::invalid_argument,
                  what + " \"" + name + "\" is unknown; known are: " + join_names(known));
    }
    if (std::find(unique.begin(), unique.end(), name) == unique.end()) unique.push_back(name);
  }
  if (unique.empty())
    throw Error(ErrorCode::invalid_argument,
                "no " + what + " is named; known are: " + join_names(known));
  names = std::move(unique);
}

std::vector<std::string> nearest_names(const std::string& wanted, std::vector<std::string> names,
                                       std::size_t max) {
  std::vector<std::pair<std::size_t, std::string>> ranked;
  const std::size_t near = std::max<std::size_t>(2, wanted.size() / 2);
  const std::string bare_wanted = without_scope(wanted);
  for (auto& name : names) {
    std::size_t distance = edit_distance(wanted, name, near);
    // The right name in the wrong namespace, or without one.
    const std::size_t bare =
        edit_distance(bare_wanted, without_scope(name), bare_wanted.size() / 4);
    if (bare <= bare_wanted.size() / 4) distance = std::min(distance, bare + 1);
    if (distance <= near) ranked.emplace_back(distance, std::move(name));
  }
  std::sort(ranked.begin(), ranked.end());
  if (ranked.size() > max) ranked.resize(max);
  std::vector<std::string> nearest;
  for (auto& [distance, name] : ranked) nearest.push_back(std::move(name));
  return nearest;
}

}  // namespace stitch::base
