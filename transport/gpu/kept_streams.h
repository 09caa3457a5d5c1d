#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/transport/gpu/cuda_api.h"

namespace stitch::transport::gpu {

// The streams of lanes that have ended, for later lanes of the same device. None is ever destroyed:
// what was allocated on a stream outlives its lane in the hands of the program, and an allocator
// that is stream-ordered names the stream when it gets that memory back, or later, when it gives
// its cache back to the device (libtorch's, with expandable segments or cudaMallocAsync). libtorch
// keeps the streams of its own pool for the same reason. Lives as long as the libraries that made
// the streams. Thread contract: any thread.
class KeptStreams {
 public:
  static constexpr std::size_t kStreams = 3;  // of a lane
  using Streams = std::array<cuda::Stream, kStreams>;

  // Those of a lane of that device that has ended; nothing when there are none.
  [[nodiscard]] std::optional<Streams> take(int device);
  // REQUIRES: all work on them has ended.
  void keep(int device, const Streams& streams);

 private:
  base::Mutex mutex_;
  std::map<int, std::vector<Streams>> by_device_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::transport::gpu
