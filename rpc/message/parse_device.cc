#include "stitch/rpc/message/parse_device.h"

#include <charconv>
#include <system_error>

#include "stitch/base/error.h"

namespace stitch::rpc {

c10::Device parse_device(const std::string& text) {
  static const std::string kCuda = "cuda:";
  if (text == "cpu") return c10::Device(c10::kCPU);
  if (text == "cuda") return c10::Device(c10::kCUDA, 0);
  int index = -1;
  if (text.starts_with(kCuda)) {
    const char* const end = text.data() + text.size();
    const auto [at, error] = std::from_chars(text.data() + kCuda.size(), end, index);
    if (error != std::errc() || at != end) index = -1;
  }
  constexpr int kMaxIndex = 63;
  if (index < 0 || index > kMaxIndex) {
    throw Error(ErrorCode::invalid_argument,
                "\"" + text +
                    "\" is no device that tensors are moved to; known are cpu and cuda:0 "
                    "to cuda:" +
                    std::to_string(kMaxIndex));
  }
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
}

}  // namespace stitch::rpc
