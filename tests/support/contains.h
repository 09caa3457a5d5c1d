#pragma once

#include <string>

namespace stitch::testing {

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace stitch::testing
