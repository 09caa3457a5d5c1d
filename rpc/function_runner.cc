#include "stitch/rpc/function_runner.h"

#include "stitch/base/demangle.h"

namespace stitch::detail {

void throw_mismatch(std::size_t position, const std::type_info& type) {
  throw Error(ErrorCode::invalid_argument,
              "argument " + std::to_string(position) + " does not match its type on the callee, " +
                  base::demangle(type.name()) + ": " + to_error(std::current_exception()).what());
}

void throw_other_type(const std::type_info& type) {
  throw Error(ErrorCode::invalid_argument, "the object is of type " + base::demangle(type.name()));
}

}  // namespace stitch::detail
