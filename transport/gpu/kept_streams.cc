#include "stitch/transport/gpu/kept_streams.h"

namespace stitch::transport::gpu {

std::optional<KeptStreams::Streams> KeptStreams::take(int device) {
  const base::MutexLock lock(mutex_);
  std::vector<Streams>& kept = by_device_[device];
  if (kept.empty()) return std::nullopt;
  const Streams streams = kept.back();
  kept.pop_back();
  return streams;
}

void KeptStreams::keep(int device, const Streams& streams) {
  const base::MutexLock lock(mutex_);
  by_device_[device].push_back(streams);
}

}  // namespace stitch::transport::gpu
