#include "stitch/rpc/calls/unknown_function.h"

#include <cstddef>
#include <utility>

#include "stitch/base/name_list.h"
#include "stitch/rpc/function/registry.h"
#include "stitch/rpc/message/message.h"

namespace stitch::rpc {

namespace {
constexpr std::size_t kMaxNamesBytes = 16 << 10;
}  // namespace

std::string registered_function_names() {
  std::string names;
  for (const auto& name : FunctionRegistry::instance().names()) {
    if (names.size() < kMaxNamesBytes) names += name + '\n';
  }
  return names;
}

std::string near_function_names(std::string_view wanted, std::string_view names) {
  // A longer text does not come from registered_function_names().
  auto list = split_lines(std::string(names.substr(0, 2 * kMaxNamesBytes)));
  std::string near;
  for (const auto& name : base::nearest_names(std::string(wanted), std::move(list), 3))
    near += (near.empty() ? "; near names there: " : ", ") + name;
  return near;
}

}  // namespace stitch::rpc
