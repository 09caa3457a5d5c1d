#pragma once

#include <string>

namespace stitch::base {

// The readable form of a mangled C++ name; the name itself when it is not one. Any thread.
[[nodiscard]] std::string demangle(const char* mangled);

}  // namespace stitch::base
