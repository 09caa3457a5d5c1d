#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

#include "stitch/rpc/message/device_event.h"

// In which order streams of devices make and use a gradient. Nothing here costs CPU tensors more
// than a look at their device.
namespace stitch::dist_autograd {

// Whether its memory belongs to a device whose work is queued on streams.
[[nodiscard]] inline bool is_queued(c10::Device device) {
  return !device.is_cpu() && !device.is_meta() && c10::impl::hasDeviceGuardImpl(device.type());
}
[[nodiscard]] inline bool is_on_device(const at::Tensor& tensor) {
  return !tensor.is_cpu() && is_queued(tensor.device());
}

[[nodiscard]] inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}
[[nodiscard]] inline c10::Stream default_stream(const c10::Stream& stream) {
  return c10::impl::VirtualGuardImpl(stream.device_type()).getDefaultStream(stream.device());
}

// Has what `later` does from now on wait for what `earlier` has now.
inline void order_streams(const c10::Stream& earlier, const c10::Stream& later) {
  if (earlier == later) return;
  rpc::DeviceEvent(earlier).block(later);
}

// The memory of a tensor on a device is not used again, once the tensor is gone, before what
// `stream` has by then has ended. Needed where the tensor was made on that stream, too: the memory
// of what a message brought belongs to the stream of the copies.
inline void keep_for(const at::Tensor& tensor, const c10::Stream& stream) {
  const c10::impl::VirtualGuardImpl device(tensor.device().type());
  const auto record = [&](const at::Tensor& part) {
    if (part.has_storage()) device.recordDataPtrOnStream(part.storage().data_ptr(), stream);
  };
  if (tensor.is_sparse()) {
    record(tensor._indices());
    record(tensor._values());
  } else {
    record(tensor);
  }
}

// Where in the work of a device a gradient is ready. Thread contract: one thread at a time.
class ReadyPoint {
 public:
  explicit ReadyPoint(const c10::Stream& made_on) : stream_(made_on) {}
  // After what its stream has now. Without it, only the stream itself may use the gradient.
  void record() { event_.emplace(stream_); }
  [[nodiscard]] const c10::Stream& stream() const noexcept { return stream_; }
  // Has what `user` does from now on wait for it. REQUIRES: recorded, or `user` is its stream.
  void wait_on(const c10::Stream& user) const {
    if (user != stream_) event_->block(user);
  }

 private:
  c10::Stream stream_;
  std::optional<rpc::DeviceEvent> event_;
};

}  // namespace stitch::dist_autograd
