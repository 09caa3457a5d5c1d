#include "stitch/rpc/given_arguments.h"

namespace stitch::rpc {

GivenArgument* given_argument(InMessage& request, std::size_t position) {
  auto* const given = request.find_attachment<GivenArguments>();
  return given == nullptr ? nullptr : given->find(position);
}

}  // namespace stitch::rpc
