#pragma once

#include "stitch/transport/gpu/cuda_api.h"

namespace stitch::transport::gpu {

// What a thread of stitch's own does before its other calls of CUDA. It makes `device` current, in
// that order: a call on a thread that has set no device creates a context on the first one, which
// takes hundreds of MiB of a device that the process may not use at all. And it lets itself query
// events and allocate while another thread of the program captures a graph: in CUDA's default mode
// that would make the capture invalid.
inline cuda::Status begin_own_thread(const CudaApi& cuda, int device) {
  const cuda::Status status = cuda.set_device(device);
  if (status != cuda::kSuccess) return status;
  cuda::CaptureMode mode = cuda::kCaptureRelaxed;
  return cuda.thread_exchange_stream_capture_mode(&mode);
}

}  // namespace stitch::transport::gpu
