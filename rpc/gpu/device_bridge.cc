#include "stitch/rpc/gpu/device_bridge.h"

#include <atomic>

namespace stitch::rpc {

namespace {

constinit std::atomic<const DeviceBridge*> the_bridge{nullptr};

}  // namespace

const DeviceBridge* device_bridge() noexcept { return the_bridge.load(std::memory_order_acquire); }

bool set_device_bridge(const DeviceBridge* bridge) noexcept {
  the_bridge.store(bridge, std::memory_order_release);
  return true;
}

}  // namespace stitch::rpc
