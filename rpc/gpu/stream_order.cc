// How streams are put in order: what of StreamSet needs CUDA itself.
#include "stitch/rpc/gpu/stream_order.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <string_view>
#include <utility>

#include "stitch/rpc/future/current_streams.h"
#include "stitch/rpc/gpu/on_device.h"
#include "stitch/rpc/message/device_event.h"

namespace stitch::rpc {

namespace {

c10::impl::VirtualGuardImpl cuda() { return c10::impl::VirtualGuardImpl(c10::kCUDA); }

// All of CUDA's errors that a capture causes say so, and no others.
bool is_of_capture(const Error& error) {
  return std::string_view(error.what()).find("captur") != std::string_view::npos;
}

}  // namespace

void order(const c10::Stream& earlier, const c10::Stream& later) {
  if (earlier == later) return;
  on_device(earlier.device(), [&] {
    if (!cuda().queryStream(earlier)) DeviceEvent(earlier).block(later);
  });
}

bool is_lost(c10::Device device) noexcept {
  try {
    on_device(device, [device] { return cuda().queryStream(cuda().getDefaultStream(device)); });
    return false;
  } catch (const Error& error) {
    return error.code() == ErrorCode::internal && !is_of_capture(error);
  } catch (...) {
    return false;  // there was no memory to say what is wrong
  }
}

std::shared_ptr<const StreamSet> StreamSet::from_pool(std::uint64_t needed) {
  std::vector<c10::Stream> streams;
  std::uint64_t left = devices_in_use.load(std::memory_order_acquire);
  for (int index = 0; left != 0; ++index, left >>= 1) {
    if ((left & 1) == 0) continue;
    const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
    try {
      // The first stream of a pool makes all of them.
      const c10::Stream stream =
          on_device(device, [device] { return cuda().getStreamFromGlobalPool(device); });
      order(cuda().getDefaultStream(device), stream);
      streams.push_back(stream);
    } catch (const Error&) {
      if ((needed & device_bit(device)) != 0 || !is_lost(device)) throw;
    }
  }
  return streams.empty() ? nullptr : std::make_shared<const StreamSet>(std::move(streams));
}

void StreamSet::wait_for_current() const {
  for (const auto& stream : streams_) order(cuda().getStream(stream.device()), stream);
}

void StreamSet::wait_for_default() const {
  for (const auto& stream : streams_) order(cuda().getDefaultStream(stream.device()), stream);
}

}  // namespace stitch::rpc
