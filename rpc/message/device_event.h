#pragma once

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <optional>
#include <utility>

namespace stitch::rpc {

// A point in the work of a device. All that is asked of it, and its end, happens on its device:
// libtorch goes back to the thread's device after each call, and on a thread that uses none yet
// that would create a context on the first one. Thread contract: one thread at a time.
class DeviceEvent {
 public:
  // After what `stream` has now.
  explicit DeviceEvent(const c10::Stream& stream) : device_(stream.device()) {
    const c10::DeviceGuard on(device_);
    event_.emplace(stream.device_type()).record(stream);
  }
  DeviceEvent(DeviceEvent&& other) noexcept
      : device_(other.device_), event_(std::exchange(other.event_, std::nullopt)) {}
  DeviceEvent& operator=(DeviceEvent&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(event_, other.event_);
    return *this;
  }
  ~DeviceEvent() {
    if (!event_) return;
    try {
      const c10::DeviceGuard on(device_);
      event_.reset();
    } catch (...) {
      // The device is lost.
    }
  }

  [[nodiscard]] c10::Device device() const noexcept { return device_; }
  // Has what `stream` runs from now on wait for it.
  void block(const c10::Stream& stream) const {
    const c10::DeviceGuard on(stream.device());
    event_->block(stream);
  }
  // Whether it has happened.
  [[nodiscard]] bool query() const {
    const c10::DeviceGuard on(device_);
    return event_->query();
  }

 private:
  c10::Device device_;
  std::optional<c10::Event> event_;  // nothing once moved from
};

}  // namespace stitch::rpc
