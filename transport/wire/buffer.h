#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace stitch::transport {

enum class DeviceType : std::uint8_t { cpu = 0, cuda = 1 };

// Where memory is. Index 0 for the CPU.
struct Device {
  DeviceType type = DeviceType::cpu;
  std::uint8_t index = 0;
  friend bool operator==(Device, Device) = default;
};

// Bytes on a device and what keeps them alive. Copies share the bytes; the last copy frees them, on
// the thread that drops it. The bytes must not be written to while a send holds the Buffer.
struct Buffer {
  Device device;
  void* data = nullptr;
  std::size_t bytes = 0;
  std::shared_ptr<const void> keep_alive;
};

// Allocates memory for `bytes` received bytes, aligned to 64. Called on reader threads; must not
// block on the network.
using Allocator = std::function<Buffer(Device device, std::size_t bytes)>;

// Plain memory aligned to 64 bytes, uninitialised. Throws Error(overloaded) when there is none, and
// Error(unimplemented) for a device other than the CPU.
[[nodiscard]] Buffer allocate_buffer(Device device, std::size_t bytes);

}  // namespace stitch::transport
