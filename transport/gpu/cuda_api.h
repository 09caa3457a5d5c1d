#pragma once

#include <cstddef>

namespace stitch::transport::gpu {

// The functions of the CUDA runtime and driver that stitch uses, as a table: filled at run time
// from the libraries of the machine, or by the double of the tests. The library links nothing of
// CUDA and needs no header of it; tests/gpu compares these types with CUDA's own where the toolkit
// is installed. CUDA's documentation has the values and meanings.
namespace cuda {

enum Status : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotReady = 600,
  kPeerAccessAlreadyEnabled = 704,
  kIllegalAddress = 700,
  kLaunchFailure = 719,
};
struct StreamTag;
struct EventTag;
using Stream = StreamTag*;  // cudaStream_t; null: the default stream
using Event = EventTag*;    // cudaEvent_t
struct Uuid {               // CUuuid
  char bytes[16];
};
enum CopyKind : int { kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3 };
enum CaptureStatus : int { kCaptureNone = 0, kCaptureActive = 1 };
enum CaptureMode : int { kCaptureGlobal = 0, kCaptureRelaxed = 2 };

inline constexpr unsigned kStreamNonBlocking = 1;   // cudaStreamNonBlocking
inline constexpr unsigned kEventDisableTiming = 2;  // cudaEventDisableTiming
inline constexpr unsigned kHostAllocPortable = 1;   // cudaHostAllocPortable

}  // namespace cuda

// Thread contract: constant once filled; any thread may call the functions, which act on the
// calling thread's current device as CUDA's do.
struct CudaApi {
  cuda::Status (*get_device_count)(int* count);
  cuda::Status (*set_device)(int device);
  cuda::Status (*runtime_get_version)(int* version);     // 13000 for 13.0
  int (*device_get_uuid)(cuda::Uuid* uuid, int device);  // cuDeviceGetUuid
  cuda::Status (*device_get_stream_priority_range)(int* least, int* greatest);

  cuda::Status (*malloc)(void** memory, std::size_t bytes);
  cuda::Status (*free)(void* memory);
  cuda::Status (*host_alloc)(void** memory, std::size_t bytes, unsigned flags);
  cuda::Status (*free_host)(void* memory);

  cuda::Status (*memcpy_async)(void* to, const void* from, std::size_t bytes, cuda::CopyKind kind,
                               cuda::Stream stream);
  cuda::Status (*memcpy_peer_async)(void* to, int to_device, const void* from, int from_device,
                                    std::size_t bytes, cuda::Stream stream);
  cuda::Status (*memset_async)(void* memory, int value, std::size_t bytes, cuda::Stream stream);

  cuda::Status (*stream_create_with_priority)(cuda::Stream* stream, unsigned flags, int priority);
  cuda::Status (*stream_destroy)(cuda::Stream stream);
  cuda::Status (*stream_query)(cuda::Stream stream);
  cuda::Status (*stream_synchronize)(cuda::Stream stream);
  cuda::Status (*stream_is_capturing)(cuda::Stream stream, cuda::CaptureStatus* status);

  // Sets how captures of other threads restrict the calls of this thread; `mode` gets the old mode.
  cuda::Status (*thread_exchange_stream_capture_mode)(cuda::CaptureMode* mode);

  cuda::Status (*event_create_with_flags)(cuda::Event* event, unsigned flags);
  cuda::Status (*event_destroy)(cuda::Event event);
  cuda::Status (*event_record)(cuda::Event event, cuda::Stream stream);
  cuda::Status (*event_query)(cuda::Event event);  // kSuccess or kNotReady

  cuda::Status (*device_can_access_peer)(int* can, int device, int peer);
  cuda::Status (*device_enable_peer_access)(int peer, unsigned flags);

  // Returns and clears the last error of this thread. Does not ask the device.
  cuda::Status (*get_last_error)();
  const char* (*get_error_name)(cuda::Status status);
  const char* (*get_error_string)(cuda::Status status);
};

// Prepares a thread of stitch for CUDA. Makes `device` current first: a call on a thread without a
// device creates a context on the first device, which takes hundreds of MiB there. Then relaxes the
// thread's capture mode: in the default mode, an event query or an allocation on this thread would
// invalidate a graph that another thread of the program captures.
inline cuda::Status begin_own_thread(const CudaApi& cuda, int device) {
  const cuda::Status status = cuda.set_device(device);
  if (status != cuda::kSuccess) return status;
  cuda::CaptureMode mode = cuda::kCaptureRelaxed;
  return cuda.thread_exchange_stream_capture_mode(&mode);
}

// Relaxes the capture mode of a thread of the program while it exists: in the default mode, a
// question about a stream or an event would invalidate a graph that another thread captures.
class RelaxedCapture {
 public:
  // `cuda` may be null, where there is no CUDA.
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
  cuda::CaptureMode before_ = cuda::kCaptureRelaxed;  // at first; then the mode of the thread
};

}  // namespace stitch::transport::gpu

// The functions of CudaApi by the names that CUDA gives them: X(member, symbol).
#define STITCH_CUDA_RUNTIME_FUNCTIONS(X)                                      \
  X(get_device_count, cudaGetDeviceCount)                                     \
  X(set_device, cudaSetDevice)                                                \
  X(runtime_get_version, cudaRuntimeGetVersion)                               \
  X(device_get_stream_priority_range, cudaDeviceGetStreamPriorityRange)       \
  X(malloc, cudaMalloc)                                                       \
  X(free, cudaFree)                                                           \
  X(host_alloc, cudaHostAlloc)                                                \
  X(free_host, cudaFreeHost)                                                  \
  X(memcpy_async, cudaMemcpyAsync)                                            \
  X(memcpy_peer_async, cudaMemcpyPeerAsync)                                   \
  X(memset_async, cudaMemsetAsync)                                            \
  X(stream_create_with_priority, cudaStreamCreateWithPriority)                \
  X(stream_destroy, cudaStreamDestroy)                                        \
  X(stream_query, cudaStreamQuery)                                            \
  X(stream_synchronize, cudaStreamSynchronize)                                \
  X(stream_is_capturing, cudaStreamIsCapturing)                               \
  X(thread_exchange_stream_capture_mode, cudaThreadExchangeStreamCaptureMode) \
  X(event_create_with_flags, cudaEventCreateWithFlags)                        \
  X(event_destroy, cudaEventDestroy)                                          \
  X(event_record, cudaEventRecord)                                            \
  X(event_query, cudaEventQuery)                                              \
  X(device_can_access_peer, cudaDeviceCanAccessPeer)                          \
  X(device_enable_peer_access, cudaDeviceEnablePeerAccess)                    \
  X(get_last_error, cudaGetLastError)                                         \
  X(get_error_name, cudaGetErrorName)                                         \
  X(get_error_string, cudaGetErrorString)

// The second version tells the parts of a divided GPU (MIG) apart.
#define STITCH_CUDA_DRIVER_FUNCTIONS(X) X(device_get_uuid, cuDeviceGetUuid_v2)
