#include "tests/gpu/double/fake_cuda.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace stitch::transport::gpu::test {
namespace {

using cuda::Status;

constexpr auto kNoSuchDevice = static_cast<Status>(101);

// A handle: never an address, never used again.
template <typename Handle>
Handle make_handle(std::uintptr_t kind, std::uint64_t id) {
  return reinterpret_cast<Handle>((kind << 48) | (static_cast<std::uintptr_t>(id) << 4));
}

FakeMemory::Actor actor_of(const Op& op, int device = -1) {
  return {op.process, device, &op.clock, op.epoch, op.what};
}

}  // namespace

bool FakeCuda::exists(int device) const { return device >= 0 && device < machine_.options.devices; }

FakeStream* FakeCuda::find(Caller& caller, cuda::Stream stream, const char* function) {
  if (stream == nullptr) {
    FakeStream*& found = machine_.default_streams[{caller.process, caller.in.device}];
    if (found == nullptr) {
      found = &machine_.make_stream(caller.process, caller.in.device, false);
      found->is_default = true;
    }
    return found;
  }
  const auto found = machine_.stream_handles.find(stream);
  if (found == machine_.stream_handles.end() || found->second->process != caller.process) {
    machine_.violation(std::string(function) + "() got no stream of process " +
                       std::to_string(caller.process));
    return nullptr;
  }
  return found->second;
}

FakeEvent* FakeCuda::find_event(Caller& caller, cuda::Event event, const char* function) {
  const auto found = machine_.event_handles.find(event);
  if (found == machine_.event_handles.end() || found->second->process != caller.process) {
    machine_.violation(std::string(function) + "() got no event of process " +
                       std::to_string(caller.process));
    return nullptr;
  }
  return found->second.get();
}

bool FakeCuda::implicit_sync(Caller& caller, bool wanted, const char* what) {
  return !wanted ||
         machine_.wait_until_device_idle(caller, caller.in.device,
                                         std::string(what) + "(), which waits for the device");
}

// --- devices ------------------------------------------------------------------------------------

Status FakeCuda::get_device_count(Caller&, int* count) {
  *count = machine_.options.devices;
  return cuda::kSuccess;
}

Status FakeCuda::set_device(Caller& caller, int device) {
  if (!exists(device)) return kNoSuchDevice;
  caller.in.device = device;
  machine_.contexts.insert({caller.process, device});  // as of CUDA 12
  return cuda::kSuccess;
}

Status FakeCuda::runtime_get_version(Caller&, int* version) {
  *version = 13000;
  return cuda::kSuccess;
}

int FakeCuda::device_get_uuid(Caller&, cuda::Uuid* uuid, int device) {
  if (!exists(device)) return kNoSuchDevice;
  std::memset(uuid->bytes, 0x5a, sizeof(uuid->bytes));
  std::memcpy(uuid->bytes, &device, sizeof(device));
  return 0;
}

Status FakeCuda::device_get_stream_priority_range(Caller&, int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cuda::kSuccess;
}

// --- memory -------------------------------------------------------------------------------------

Status FakeCuda::malloc(Caller& caller, void** memory, std::size_t bytes) {
  *memory = nullptr;
  if (bytes == 0) return cuda::kSuccess;
  if (!implicit_sync(caller, machine_.options.sync_on_alloc, "malloc")) return cuda::kLaunchFailure;
  const int device = caller.in.device;
  const std::size_t all = machine_.options.device_memory;
  if (bytes > all - std::min(all, machine_.memory.used(device))) return cuda::kOutOfMemory;
  *memory = machine_.memory.allocate(FakeMemory::Kind::device, caller.process, device, bytes,
                                     machine_.actor(caller, "malloc()"));
  return *memory == nullptr ? cuda::kOutOfMemory : cuda::kSuccess;
}

Status FakeCuda::host_alloc(Caller& caller, void** memory, std::size_t bytes, unsigned) {
  *memory = nullptr;
  if (bytes == 0) return cuda::kSuccess;
  if (!implicit_sync(caller, machine_.options.sync_on_alloc, "host_alloc"))
    return cuda::kLaunchFailure;
  *memory = machine_.memory.allocate(FakeMemory::Kind::pinned, caller.process, -1, bytes,
                                     machine_.actor(caller, "host_alloc()"));
  return *memory == nullptr ? cuda::kOutOfMemory : cuda::kSuccess;
}

Status FakeCuda::release(Caller& caller, FakeMemory::Kind kind, void* memory, const char* what) {
  if (memory == nullptr) return cuda::kSuccess;
  if (!implicit_sync(caller, machine_.options.sync_on_free, what)) return cuda::kLaunchFailure;
  const auto actor = machine_.actor(caller, std::string(what) + "()");
  if (machine_.memory.release(kind, caller.process, memory, actor)) return cuda::kSuccess;
  machine_.violation(std::string(what) + "() got no such memory of process " +
                     std::to_string(caller.process));
  return cuda::kInvalidValue;
}

Status FakeCuda::free(Caller& caller, void* memory) {
  return release(caller, FakeMemory::Kind::device, memory, "free");
}

Status FakeCuda::free_host(Caller& caller, void* memory) {
  return release(caller, FakeMemory::Kind::pinned, memory, "free_host");
}

Status FakeCuda::submit(cuda::Stream handle, Caller& caller, const std::string& what,
                        std::size_t bytes, std::function<void(Op&)> execute, int gate) {
  FakeStream* const stream = find(caller, handle, what.c_str());
  if (stream == nullptr) return kInvalidHandle;
  const OpPtr op = machine_.make_op(*stream, what);
  op->duration = machine_.draw(bytes);
  op->gate = gate;
  op->execute = std::move(execute);
  machine_.submit(op, machine_.host_clock);
  return cuda::kSuccess;
}

Status FakeCuda::copy(Caller& caller, void* to, const void* from, std::size_t bytes,
                      cuda::Stream stream, const char* what) {
  return submit(stream, caller, what, bytes, [this, to, from, bytes](Op& self) {
    const bool readable = machine_.memory.access(actor_of(self), from, bytes, false);
    const bool writable = machine_.memory.access(actor_of(self), to, bytes, true);
    if (readable && writable && bytes > 0) std::memmove(to, from, bytes);
  });
}

Status FakeCuda::memcpy_async(Caller& caller, void* to, const void* from, std::size_t bytes,
                              cuda::CopyKind kind, cuda::Stream stream) {
  const auto on_device = [&](const void* memory) {
    const FakeMemory::Place place = machine_.memory.find(memory);
    return place.block >= 0 && place.kind == FakeMemory::Kind::device;
  };
  const bool wrong_kind = on_device(to) != (kind != cuda::kDeviceToHost) ||
                          on_device(from) != (kind != cuda::kHostToDevice);
  if (bytes > 0 && wrong_kind) return cuda::kInvalidValue;
  return copy(caller, to, from, bytes, stream, "copy");
}

Status FakeCuda::memcpy_peer_async(Caller& caller, void* to, int to_device, const void* from,
                                   int from_device, std::size_t bytes, cuda::Stream stream) {
  if (machine_.memory.find(to).device != to_device ||
      machine_.memory.find(from).device != from_device)
    return cuda::kInvalidValue;
  return copy(caller, to, from, bytes, stream, "peer copy");
}

Status FakeCuda::memset_async(Caller& caller, void* memory, int value, std::size_t bytes,
                              cuda::Stream stream) {
  return submit(stream, caller, "memset", bytes, [this, memory, value, bytes](Op& self) {
    if (machine_.memory.access(actor_of(self), memory, bytes, true) && bytes > 0)
      std::memset(memory, value, bytes);
  });
}

// --- streams and events -------------------------------------------------------------------------

Status FakeCuda::stream_create_with_priority(Caller& caller, cuda::Stream* stream, unsigned flags,
                                             int) {
  FakeStream& made = machine_.make_stream(caller.process, caller.in.device,
                                          (flags & cuda::kStreamNonBlocking) == 0);
  *stream = make_handle<cuda::Stream>(1, static_cast<std::uint64_t>(made.id) + 1);
  machine_.stream_handles[*stream] = &made;
  return cuda::kSuccess;
}

Status FakeCuda::stream_destroy(Caller& caller, cuda::Stream stream) {
  if (stream == nullptr || find(caller, stream, "stream_destroy") == nullptr) return kInvalidHandle;
  machine_.stream_handles.erase(stream);  // its work goes on
  return cuda::kSuccess;
}

Status FakeCuda::seen(const OpPtr& op) {
  if (!op) return cuda::kSuccess;
  if (op->state != Op::State::done) return cuda::kNotReady;
  machine_.host_clock.join(op->clock);
  return cuda::kSuccess;
}

Status FakeCuda::stream_query(Caller& caller, cuda::Stream handle) {
  FakeStream* const stream = find(caller, handle, "stream_query");
  return stream == nullptr ? kInvalidHandle : seen(stream->tail);
}

Status FakeCuda::stream_synchronize(Caller& caller, cuda::Stream handle) {
  FakeStream* const stream = find(caller, handle, "stream_synchronize");
  if (stream == nullptr) return kInvalidHandle;
  if (!stream->tail) return cuda::kSuccess;
  return machine_.wait_for(caller, {stream->tail}, "stream_synchronize()") ? cuda::kSuccess
                                                                           : cuda::kLaunchFailure;
}

Status FakeCuda::stream_wait_event(Caller& caller, cuda::Stream handle, cuda::Event event_handle) {
  FakeStream* const stream = find(caller, handle, "stream_wait_event");
  FakeEvent* const event = find_event(caller, event_handle, "stream_wait_event");
  if (stream == nullptr || event == nullptr) return kInvalidHandle;
  if (!event->marker) return cuda::kSuccess;
  const OpPtr op = machine_.make_op(*stream, "wait for an event");
  op->after.push_back(event->marker);
  machine_.submit(op, machine_.host_clock);
  return cuda::kSuccess;
}

Status FakeCuda::stream_is_capturing(Caller& caller, cuda::Stream handle,
                                     cuda::CaptureStatus* status) {
  FakeStream* const stream = find(caller, handle, "stream_is_capturing");
  if (stream == nullptr) return kInvalidHandle;
  *status = stream->capturing ? cuda::kCaptureActive : cuda::kCaptureNone;
  return cuda::kSuccess;
}

Status FakeCuda::thread_exchange_stream_capture_mode(Caller& caller, cuda::CaptureMode* mode) {
  std::swap(*mode, caller.in.capture_mode);
  return cuda::kSuccess;
}

Status FakeCuda::event_create_with_flags(Caller& caller, cuda::Event* event, unsigned) {
  *event = make_handle<cuda::Event>(2, ++machine_.last_id);
  machine_.event_handles[*event] =
      std::make_unique<FakeEvent>(FakeEvent{caller.process, caller.in.device, nullptr});
  return cuda::kSuccess;
}

Status FakeCuda::event_destroy(Caller& caller, cuda::Event event) {
  if (find_event(caller, event, "event_destroy") == nullptr) return kInvalidHandle;
  machine_.event_handles.erase(event);
  return cuda::kSuccess;
}

Status FakeCuda::event_record(Caller& caller, cuda::Event event_handle, cuda::Stream handle) {
  FakeStream* const stream = find(caller, handle, "event_record");
  FakeEvent* const event = find_event(caller, event_handle, "event_record");
  if (stream == nullptr || event == nullptr) return kInvalidHandle;
  if (event->device != stream->device) {
    machine_.violation("event_record() got an event of device " + std::to_string(event->device) +
                       " and a stream of device " + std::to_string(stream->device));
    return kInvalidHandle;
  }
  event->marker = machine_.make_op(*stream, "event");
  machine_.submit(event->marker, machine_.host_clock);
  return cuda::kSuccess;
}

Status FakeCuda::event_query(Caller& caller, cuda::Event handle) {
  FakeEvent* const event = find_event(caller, handle, "event_query");
  return event == nullptr ? kInvalidHandle : seen(event->marker);
}

// --- other devices ------------------------------------------------------------------------------

Status FakeCuda::device_can_access_peer(Caller&, int* can, int device, int peer) {
  if (!exists(device) || !exists(peer)) return kNoSuchDevice;
  *can = device != peer ? 1 : 0;
  return cuda::kSuccess;
}

Status FakeCuda::device_enable_peer_access(Caller& caller, int peer, unsigned) {
  const int device = caller.in.device;
  if (!exists(peer) || peer == device) return kNoSuchDevice;
  if (machine_.memory.has_peer_access(caller.process, device, peer))
    return cuda::kPeerAccessAlreadyEnabled;
  machine_.memory.enable_peer_access(caller.process, device, peer);
  return cuda::kSuccess;
}

// --- errors and kernels -------------------------------------------------------------------------

Status FakeCuda::get_last_error(Caller& caller) {
  return std::exchange(caller.in.last_error, cuda::kSuccess);
}

const char* FakeCuda::get_error_name(Caller&, Status status) {
  return status == cuda::kSuccess ? "cudaSuccess" : "cudaErrorOfTheDouble";
}

const char* FakeCuda::get_error_string(Caller&, Status status) {
  switch (status) {
    case cuda::kSuccess:
      return "no error";
    case cuda::kOutOfMemory:
      return "out of memory";
    case cuda::kIllegalAddress:
      return "an illegal memory access was encountered";
    default:
      return "an error of the double";
  }
}

Status FakeCuda::launch(Caller& caller, cuda::Stream stream, FakeGpu::Kernel kernel) {
  const auto broken = machine_.broken.find({caller.process, caller.in.device});
  if (broken != machine_.broken.end()) return broken->second;
  const std::string name = kernel.name;
  const int gate = kernel.gate;
  const auto execute = [this, kernel = std::move(kernel)](Op& self) {
    bool allowed = true;
    for (const bool write : {false, true}) {
      for (const FakeGpu::Bytes& bytes : write ? kernel.writes : kernel.reads) {
        allowed &=
            machine_.memory.access(actor_of(self, self.device), bytes.memory, bytes.count, write);
      }
    }
    if (allowed && kernel.body) kernel.body();
  };
  return submit(stream, caller, name, 0, execute, gate);
}

}  // namespace stitch::transport::gpu::test
