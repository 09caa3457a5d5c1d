#include "stitch/rpc/calls/extension.h"

#include <vector>

namespace stitch::rpc {

namespace {
std::vector<ExtensionFactory>& factories() {
  static std::vector<ExtensionFactory> list;
  return list;
}
}  // namespace

int register_extension(ExtensionFactory factory) {
  factories().push_back(factory);
  return static_cast<int>(factories().size()) - 1;
}

const std::vector<ExtensionFactory>& extension_factories() { return factories(); }

}  // namespace stitch::rpc
