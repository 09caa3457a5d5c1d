#pragma once

#include <cstddef>

namespace stitch::transport::gpu {

// The part of the CUDA runtime and driver that stitch uses, as a table of functions: filled at run
// time from the libraries that are there, or by the double of the tests. Nothing of CUDA is linked
// and no header of it is needed; tests/gpu compares these types with CUDA's own where the toolkit
// is installed. Values and meanings are those of CUDA's documentation.
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

  // Sets how captures of other threads restrict the calls of this thread; `mode` gets what it was.
  cuda::Status (*thread_exchange_stream_capture_mode)(cuda::CaptureMode* mode);

  cuda::Status (*event_create_with_flags)(cuda::Event* event, unsigned flags);
  cuda::Status (*event_destroy)(cuda::Event event);
  cuda::Status (*event_record)(cuda::Event event, cuda::Stream stream);
  cuda::Status (*event_query)(cuda::Event event);  // kSuccess or kNotReady

  cuda::Status (*device_can_access_peer)(int* can, int device, int peer);
  cuda::Status (*device_enable_peer_access)(int peer, unsigned flags);

  // What a call of this thread returned last, and clears that. Does not ask the device.
  cuda::Status (*get_last_error)();
  const char* (*get_error_name)(cuda::Status status);
  const char* (*get_error_string)(cuda::Status status);
};

}  // namespace stitch::transport::gpu
