#include "stitch/dist_autograd/graph/ids.h"

#include "stitch/base/hash.h"

namespace stitch::dist_autograd {

std::string to_string(const ContextId& id) {
  return std::to_string(id.counter) + "@" + std::to_string(id.home.value()) + "." +
         std::to_string(id.epoch);
}

std::string to_string(const LinkId& id) {
  return std::to_string(id.sender.value()) + "/" + std::to_string(id.counter);
}

}  // namespace stitch::dist_autograd

std::size_t std::hash<stitch::dist_autograd::ContextId>::operator()(
    const stitch::dist_autograd::ContextId& id) const noexcept {
  return stitch::base::hash_of(id.epoch, id.home.value(), id.counter);
}

std::size_t std::hash<stitch::dist_autograd::PassId>::operator()(
    const stitch::dist_autograd::PassId& id) const noexcept {
  return stitch::base::hash_of(id.epoch, id.root.value(), id.counter);
}

std::size_t std::hash<stitch::dist_autograd::LinkId>::operator()(
    const stitch::dist_autograd::LinkId& id) const noexcept {
  return stitch::base::hash_of(id.sender.value(), id.counter);
}
