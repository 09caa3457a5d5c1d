#include "stitch/rpc/default_streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "stitch/base/error.h"
#include "stitch/rpc/future/current_streams.h"
#include "stitch/rpc/gpu/stream_order.h"

namespace stitch::rpc {

namespace {

c10::impl::VirtualGuardImpl cuda() { return c10::impl::VirtualGuardImpl(c10::kCUDA); }

// Calls f(current, default) for each device on which these differ. No device is touched for it.
template <class F>
void for_each_other_stream(F f) {
  for (int index = cuda_device_count(); index-- > 0;) {
    const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
    const c10::Stream current = cuda().getStream(device);
    const c10::Stream standard = cuda().getDefaultStream(device);
    if (current != standard) f(current, standard);
  }
}

// Nothing runs on a device that is lost: only calls that use it fail, by its name.
void order_if_there(const c10::Stream& earlier, const c10::Stream& later) {
  try {
    order(earlier, later);
  } catch (const Error&) {
    if (!is_lost(earlier.device())) throw;
  }
}

}  // namespace

void default_streams_wait_for_current() {
  for_each_other_stream([](const c10::Stream& current, const c10::Stream& standard) {
    order_if_there(current, standard);
  });
}

void current_streams_wait_for_default() {
  for_each_other_stream([](const c10::Stream& current, const c10::Stream& standard) {
    order_if_there(standard, current);
  });
}

}  // namespace stitch::rpc
