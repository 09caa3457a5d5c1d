#include "stitch/dist_autograd/graph/link_name.h"

#include <limits>

#include "stitch/rpc/function/registry.h"

namespace stitch::dist_autograd {

LinkName LinkName::of_gradient() const {
  LinkName name = *this;
  if (name.gradients < std::numeric_limits<std::uint8_t>::max()) ++name.gradients;
  return name;
}

std::string LinkName::text() const {
  std::string text;
  for (int i = 0; i < gradients; ++i) text += "gradient of ";
  if (part == Part::result) return text + "the result of a call";
  const rpc::Function* const found = rpc::FunctionRegistry::instance().find(function);
  const std::string name = found == nullptr ? "call" : found->name + "()";
  return text + (part == Part::argument ? "an argument of " + name
                                        : name + " to worker \"" + callee + "\"");
}

}  // namespace stitch::dist_autograd
