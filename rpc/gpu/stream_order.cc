// How streams are put in order: what of StreamSet needs CUDA itself.
#include "stitch/rpc/gpu/stream_order.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "stitch/base/mutex.h"
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

// Streams of libtorch's pool that no handler has, the one that was freed last in front: libtorch's
// allocator and cuBLAS keep memory for each stream that was ever used, so few are to be used. One
// after the other, handlers have the same; k at a time have k.
class FreeStreams {
 public:
  c10::Stream take(c10::Device device) {
    {
      const base::MutexLock lock(mutex_);
      std::vector<c10::Stream>& free = by_device_[device.index()];
      if (!free.empty()) {
        const c10::Stream stream = free.back();
        free.pop_back();
        return stream;
      }
    }
    // The first stream of a pool makes all of them.
    return on_device(device, [device] { return cuda().getStreamFromGlobalPool(device); });
  }
  void give_back(const c10::Stream& stream) {
    const base::MutexLock lock(mutex_);
    by_device_[stream.device_index()].push_back(stream);
  }

 private:
  base::Mutex mutex_;
  std::map<c10::DeviceIndex, std::vector<c10::Stream>> by_device_ STITCH_GUARDED_BY(mutex_);
};

FreeStreams& free_streams() {
  static auto* const streams = new FreeStreams;  // contexts of calls may outlive all else
  return *streams;
}

struct TakenStreams {
  TakenStreams() = default;
  TakenStreams(const TakenStreams&) = delete;
  TakenStreams& operator=(const TakenStreams&) = delete;
  ~TakenStreams() {
    for (const c10::Stream& stream : streams) free_streams().give_back(stream);
  }
  std::vector<c10::Stream> streams;
};

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
  }
}

std::shared_ptr<const StreamSet> StreamSet::from_pool(std::uint64_t needed) {
  const auto taken = std::make_shared<TakenStreams>();
  std::uint64_t left = devices_in_use.load(std::memory_order_acquire);
  for (int index = 0; left != 0; ++index, left >>= 1) {
    if ((left & 1) == 0) continue;
    const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
    try {
      const c10::Stream stream = free_streams().take(device);
      order(cuda().getDefaultStream(device), stream);
      taken->streams.push_back(stream);
    } catch (const Error&) {
      if ((needed & device_bit(device)) != 0 || !is_lost(device)) throw;
    }
  }
  if (taken->streams.empty()) return nullptr;
  return {new StreamSet(taken->streams), [taken](const StreamSet* set) { delete set; }};
}

void StreamSet::wait_for_current() const {
  for (const auto& stream : streams_) order(cuda().getStream(stream.device()), stream);
}

void StreamSet::wait_for_default() const {
  for (const auto& stream : streams_) order(cuda().getDefaultStream(stream.device()), stream);
}

}  // namespace stitch::rpc
