#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "tests/gpu/double/machine.h"

namespace stitch::transport::gpu::test {

// The functions of CudaApi over the machine. Guarded by the machine's lock.
class FakeCuda {
 public:
  explicit FakeCuda(Machine& machine) : machine_(machine) {}

  cuda::Status get_device_count(Caller& caller, int* count);
  cuda::Status set_device(Caller& caller, int device);
  cuda::Status runtime_get_version(Caller& caller, int* version);
  int device_get_uuid(Caller& caller, cuda::Uuid* uuid, int device);
  cuda::Status device_get_stream_priority_range(Caller& caller, int* least, int* greatest);

  cuda::Status malloc(Caller& caller, void** memory, std::size_t bytes);
  cuda::Status free(Caller& caller, void* memory);
  cuda::Status host_alloc(Caller& caller, void** memory, std::size_t bytes, unsigned flags);
  cuda::Status free_host(Caller& caller, void* memory);

  cuda::Status memcpy_async(Caller& caller, void* to, const void* from, std::size_t bytes,
                            cuda::CopyKind kind, cuda::Stream stream);
  cuda::Status memcpy_peer_async(Caller& caller, void* to, int to_device, const void* from,
                                 int from_device, std::size_t bytes, cuda::Stream stream);
  cuda::Status memset_async(Caller& caller, void* memory, int value, std::size_t bytes,
                            cuda::Stream stream);

  cuda::Status stream_create_with_priority(Caller& caller, cuda::Stream* stream, unsigned flags,
                                           int priority);
  cuda::Status stream_destroy(Caller& caller, cuda::Stream stream);
  cuda::Status stream_query(Caller& caller, cuda::Stream stream);
  cuda::Status stream_synchronize(Caller& caller, cuda::Stream stream);
  cuda::Status stream_is_capturing(Caller& caller, cuda::Stream stream,
                                   cuda::CaptureStatus* status);

  cuda::Status thread_exchange_stream_capture_mode(Caller& caller, cuda::CaptureMode* mode);

  cuda::Status event_create_with_flags(Caller& caller, cuda::Event* event, unsigned flags);
  cuda::Status event_destroy(Caller& caller, cuda::Event event);
  cuda::Status event_record(Caller& caller, cuda::Event event, cuda::Stream stream);
  cuda::Status event_query(Caller& caller, cuda::Event event);

  cuda::Status device_can_access_peer(Caller& caller, int* can, int device, int peer);
  cuda::Status device_enable_peer_access(Caller& caller, int peer, unsigned flags);

  cuda::Status get_last_error(Caller& caller);
  const char* get_error_name(Caller& caller, cuda::Status status);
  const char* get_error_string(Caller& caller, cuda::Status status);

  // Not of the table.
  cuda::Status launch(Caller& caller, cuda::Stream stream, FakeGpu::Kernel kernel);
  cuda::Status stream_wait_event(Caller& caller, cuda::Stream stream, cuda::Event event);

  // Null, after a violation, when there is none; null `stream` is the default one.
  FakeStream* find(Caller& caller, cuda::Stream stream, const char* function);
  // Where `wanted`, waits for the current device. False: that is over without it.
  bool implicit_sync(Caller& caller, bool wanted, const char* what);

 private:
  [[nodiscard]] bool exists(int device) const;
  FakeEvent* find_event(Caller& caller, cuda::Event event, const char* function);
  // Puts an operation on the stream: which moves so many bytes, or of the kernel's gate.
  cuda::Status submit(cuda::Stream stream, Caller& caller, const std::string& what,
                      std::size_t bytes, std::function<void(Op&)> execute, int gate = 0);
  // What a query of the end of that operation says; null: of nothing.
  cuda::Status seen(const OpPtr& op);
  cuda::Status copy(Caller& caller, void* to, const void* from, std::size_t bytes,
                    cuda::Stream stream, const char* what);
  cuda::Status release(Caller& caller, FakeMemory::Kind kind, void* memory, const char* what);

  Machine& machine_;
};

// Of its own, as the table of stitch has no name for it: cudaErrorInvalidResourceHandle.
inline constexpr auto kInvalidHandle = static_cast<cuda::Status>(400);

}  // namespace stitch::transport::gpu::test
