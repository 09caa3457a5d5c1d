#pragma once

#include "stitch/transport/gpu/cuda_api.h"

namespace stitch::transport::gpu {

// While it exists, calls of this thread, a thread of the program's, end no capture of a graph by
// another one. In CUDA's default mode to ask for a stream or an event would. Queues nothing itself.
class RelaxedCapture {
 public:
  // `cuda` may be null: there is none.
  explicit RelaxedCapture(const CudaApi* cuda) noexcept : cuda_(cuda) {
    if (cuda_ == nullptr) return;
    if (cuda_->thread_exchange_stream_capture_mode(&before_) != cuda::kSuccess) {
      static_cast<void>(cuda_->get_last_error());
      cuda_ = nullptr;
    }
  }
  ~RelaxedCapture() {
    if (cuda_ != nullptr) static_cast<void>(cuda_->thread_exchange_stream_capture_mode(&before_));
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const CudaApi* cuda_;
  cuda::CaptureMode before_ = cuda::kCaptureRelaxed;  // then what the thread had
};

}  // namespace stitch::transport::gpu
