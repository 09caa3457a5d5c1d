#include "stitch/base/demangle.h"

#include <cxxabi.h>

#include <memory>

namespace stitch::base {

std::string demangle(const char* mangled) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> readable(
      abi::__cxa_demangle(mangled, nullptr, nullptr, &status), &std::free);
  return status == 0 && readable ? readable.get() : mangled;
}

}  // namespace stitch::base
