#include "stitch/transport/wire/buffer.h"

#include <new>
#include <string>

#include "stitch/base/error.h"

namespace stitch::transport {

namespace {
constexpr std::align_val_t kAlignment{64};
}

Buffer allocate_buffer(Device device, std::size_t bytes) {
  if (device.type != DeviceType::cpu) {
    throw Error(ErrorCode::unimplemented,
                "buffer of " + std::to_string(bytes) +
                    " bytes on device cuda:" + std::to_string(device.index) +
                    " cannot be allocated: this build moves CPU memory only");
  }
  void* data = ::operator new(bytes == 0 ? 1 : bytes, kAlignment, std::nothrow);
  if (data == nullptr) {
    throw Error(ErrorCode::overloaded,
                "buffer of " + std::to_string(bytes) + " bytes cannot be allocated: out of memory");
  }
  return Buffer{device, data, bytes, std::shared_ptr<const void>(data, [](void* at) {
                  ::operator delete(at, kAlignment);
                })};
}

}  // namespace stitch::transport
