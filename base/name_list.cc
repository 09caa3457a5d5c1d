#include "stitch/base/name_list.h"

#include <algorithm>
#include <utility>

#include "stitch/base/error.h"

namespace stitch::transport {

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

}  // namespace stitch::transport
