#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/rpc/future/current_streams.h"
#include "stitch/rpc/message/device_event.h"

namespace stitch::rpc {

// What an exception of libtorch about a device says, without its stack: `overloaded` when memory is
// short, else `internal`; named by `what`.
[[nodiscard]] Error device_error(const std::string& what, const std::exception& exception);

// Work that was queued on devices and that something waits for: it is open once the host has seen
// the end of all of it. No device waits for it. Thread contract: one thread at a time.
class DeviceGate {
 public:
  // Waits for what is queued on `stream` now. Throws Error(internal) naming the device when that
  // has failed.
  void add(const c10::Stream& stream);
  void add_all(const StreamSet& streams);
  // Keeps the memory of a tensor until the gate is destroyed.
  void keep(at::Tensor tensor) { kept_.push_back(std::move(tensor)); }
  // Throws Error(internal) naming the device that has failed.
  [[nodiscard]] bool open();
  // Asks again and again for that time.
  [[nodiscard]] bool opens_within(std::chrono::microseconds time);

 private:
  std::vector<DeviceEvent> marks_;
  std::vector<at::Tensor> kept_;
};

}  // namespace stitch::rpc
