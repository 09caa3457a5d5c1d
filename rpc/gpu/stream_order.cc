// How streams are put in order: what of StreamSet needs CUDA itself.
#include "stitch/rpc/gpu/stream_order.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "stitch/rpc/future/current_streams.h"
#include "stitch/rpc/message/device_event.h"
#include "stitch/transport/gpu/gpu_libraries.h"
#include "stitch/transport/gpu/relaxed_capture.h"

namespace stitch::rpc {

namespace {

c10::impl::VirtualGuardImpl cuda() { return c10::impl::VirtualGuardImpl(c10::kCUDA); }

}  // namespace

void order(const c10::Stream& earlier, const c10::Stream& later) {
  if (earlier == later) return;
  const transport::gpu::RelaxedCapture relaxed(transport::gpu::GpuLibraries::of_process().cuda());
  if (cuda().queryStream(earlier)) return;
  DeviceEvent(earlier).block(later);
}

std::shared_ptr<const StreamSet> StreamSet::from_pool() {
  std::uint64_t left = devices_in_use.load(std::memory_order_acquire);
  if (left == 0) return nullptr;
  // The first stream of a pool makes all of them.
  const transport::gpu::RelaxedCapture relaxed(transport::gpu::GpuLibraries::of_process().cuda());
  std::vector<c10::Stream> streams;
  for (int index = 0; left != 0; ++index, left >>= 1) {
    if ((left & 1) == 0) continue;
    const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
    streams.push_back(cuda().getStreamFromGlobalPool(device));
    order(cuda().getDefaultStream(device), streams.back());
  }
  return std::make_shared<const StreamSet>(std::move(streams));
}

void StreamSet::wait_for_current() const {
  for (const auto& stream : streams_) order(cuda().getStream(stream.device()), stream);
}

void StreamSet::wait_for_default() const {
  for (const auto& stream : streams_) order(cuda().getDefaultStream(stream.device()), stream);
}

}  // namespace stitch::rpc
