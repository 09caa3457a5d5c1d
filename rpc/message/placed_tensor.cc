#include "stitch/rpc/message/placed_tensor.h"

#include <utility>

#include "stitch/rpc/message/parse_device.h"

namespace stitch {

PlacedTensor on(const std::string& device, at::Tensor tensor) {
  return {rpc::parse_device(device), std::move(tensor)};
}

}  // namespace stitch
