#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

#include "stitch/base/byte_io.h"
#include "stitch/base/error.h"
#include "stitch/rpc/future/current_streams.h"

namespace stitch::rpc {

// Device types on the wire: our own numbers.
enum WireDevice : std::uint8_t { kWireCpu = 0, kWireCuda = 1 };
// In a section of devices, added to the type of the device at the sender: the tensor is cast.
inline constexpr std::uint8_t kWireCast = 128;

// In a section of devices: u8 type, u8 index.
inline void write_device(base::ByteWriter& out, c10::Device device, bool cast = false) {
  out.write(
      static_cast<std::uint8_t>((device.is_cpu() ? kWireCpu : kWireCuda) + (cast ? kWireCast : 0)));
  out.write(static_cast<std::uint8_t>(device.is_cpu() ? 0 : device.index()));
}

// Throws Error(protocol) for what is no device of any worker. `cast`: where that may be said.
[[nodiscard]] inline c10::Device read_device(base::ByteReader& in, bool* cast = nullptr) {
  auto type = in.read<std::uint8_t>();
  if (cast != nullptr) {
    *cast = (type & kWireCast) != 0;
    type &= static_cast<std::uint8_t>(~kWireCast);
  }
  const auto index = in.read<std::uint8_t>();
  if (type == kWireCpu && index == 0) return c10::Device(c10::kCPU);
  if (type == kWireCuda && index < kMaxDevices)
    return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
  throw Error(ErrorCode::protocol, "section of devices names device " + std::to_string(index) +
                                       " of type " + std::to_string(type) +
                                       "; known are 0 (CPU, only 0) and 1 (CUDA, up to " +
                                       std::to_string(kMaxDevices - 1) + ")");
}

}  // namespace stitch::rpc
