#include "tests/gpu/double/fake_cuda.h"

#include <cstdio>
#include <cstring>
#include <utility>

namespace stitch::transport::gpu::test {
namespace {

using cuda::Status;

// A handle: never an address, never used again.
template <typename Handle>
Handle make_handle(std::uintptr_t kind, std::uint64_t id) {
  return reinterpret_cast<Handle>((kind << 48) | (static_cast<std::uintptr_t>(id) << 4));
}

FakeMemory::Actor actor_of(const Op& op, int device = -1) {
  return {op.process, device, &op.clock, op.epoch, op.what};
}

}  // namespace

int FakeCuda::device_count(int process) const {
  const auto visible = machine_.visible.find(process);
  return visible == machine_.visible.end() ? machine_.options.devices
                                           : static_cast<int>(visible->second.size());
}

int FakeCuda::physical(int process, int device) const {
  if (device < 0 || device >= device_count(process)) return -1;
  const auto visible = machine_.visible.find(process);
  if (visible == machine_.visible.end()) return device;
  return visible->second[static_cast<std::size_t>(device)];
}

int FakeCuda::current_device(const Caller& caller) const {
  return physical(caller.process, caller.in.device);
}

FakeStream* FakeCuda::find(Caller& caller, cuda::Stream stream, const char* function) {
  if (stream == nullptr) {
    const int device = current_device(caller);
    FakeStream*& found = machine_.default_streams[{caller.process, device}];
    if (found == nullptr) {
      found = &machine_.make_stream(caller.process, device, false);
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

void FakeCuda::wait_for_room(Caller& caller, FakeStream& stream) {
  const auto room = [&] { return stream.unfinished < machine_.options.launch_limit; };
  machine_.block_until(caller, "a launch on the full stream " + std::to_string(stream.id), room,
                       [&] { return std::vector<OpPtr>{stream.tail}; });
}

bool FakeCuda::implicit_sync(Caller& caller, bool wanted, const char* what) {
  if (!wanted) return true;
  return machine_.wait_until_device_idle(caller, current_device(caller),
                                         std::string(what) + "(), which waits for the device");
}

// --- devices ------------------------------------------------------------------------------------

Status FakeCuda::get_device_count(Caller& caller, int* count) {
  *count = device_count(caller.process);
  return *count == 0 ? cuda::kNoDevice : cuda::kSuccess;
}

Status FakeCuda::get_device(Caller& caller, int* device) {
  *device = caller.in.device;
  return cuda::kSuccess;
}

Status FakeCuda::set_device(Caller& caller, int device) {
  if (physical(caller.process, device) < 0) return static_cast<Status>(101);
  caller.in.device = device;
  machine_.contexts.insert({caller.process, physical(caller.process, device)});  // as of CUDA 12
  return cuda::kSuccess;
}

Status FakeCuda::runtime_get_version(Caller&, int* version) {
  *version = machine_.options.cuda_version;
  return cuda::kSuccess;
}

Status FakeCuda::driver_get_version(Caller&, int* version) {
  *version = machine_.options.cuda_version;
  return cuda::kSuccess;
}

Status FakeCuda::device_get_pci_bus_id(Caller& caller, char* id, int length, int device) {
  const int number = physical(caller.process, device);
  if (number < 0 || length < 13) return cuda::kInvalidValue;
  std::snprintf(id, static_cast<std::size_t>(length), "0000:%02X:00.0",
                static_cast<unsigned>(number + 1) & 0xff);
  return cuda::kSuccess;
}

int FakeCuda::device_get_uuid(Caller& caller, cuda::Uuid* uuid, int device) {
  const int number = physical(caller.process, device);
  if (number < 0) return 101;
  std::memset(uuid->bytes, 0x5a, sizeof(uuid->bytes));
  std::memcpy(uuid->bytes, &number, sizeof(number));
  return 0;
}

Status FakeCuda::mem_get_info(Caller& caller, std::size_t* free, std::size_t* total) {
  *total = machine_.options.device_memory;
  *free = *total - std::min(*total, machine_.memory.used(current_device(caller)));
  return cuda::kSuccess;
}

Status FakeCuda::device_get_stream_priority_range(Caller&, int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cuda::kSuccess;
}

Status FakeCuda::device_synchronize(Caller& caller) {
  return machine_.wait_until_device_idle(caller, current_device(caller), "device_synchronize()")
             ? cuda::kSuccess
             : cuda::kLaunchFailure;
}

// --- memory -------------------------------------------------------------------------------------

Status FakeCuda::malloc(Caller& caller, void** memory, std::size_t bytes) {
  *memory = nullptr;
  if (bytes == 0) return cuda::kSuccess;
  if (!implicit_sync(caller, machine_.options.sync_on_alloc, "malloc")) {
    return cuda::kLaunchFailure;
  }
  const int device = current_device(caller);
  const std::size_t used = machine_.memory.used(device);
  if (bytes > machine_.options.device_memory - std::min(machine_.options.device_memory, used)) {
    return cuda::kOutOfMemory;
  }
  *memory = machine_.memory.allocate(FakeMemory::Kind::device, caller.process, device, bytes,
                                     machine_.actor(caller, "malloc()"));
  return *memory == nullptr ? cuda::kOutOfMemory : cuda::kSuccess;
}

Status FakeCuda::host_alloc(Caller& caller, void** memory, std::size_t bytes, unsigned) {
  *memory = nullptr;
  if (bytes == 0) return cuda::kSuccess;
  if (!implicit_sync(caller, machine_.options.sync_on_alloc, "host_alloc")) {
    return cuda::kLaunchFailure;
  }
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

Status FakeCuda::copy(Caller& caller, void* to, const void* from, std::size_t bytes,
                      cuda::Stream handle, const char* what) {
  FakeStream* const stream = find(caller, handle, what);
  if (stream == nullptr) return kInvalidHandle;
  wait_for_room(caller, *stream);
  const OpPtr op = machine_.make_op(*stream, what);
  op->duration = machine_.draw(bytes);
  op->execute = [this, to, from, bytes](Op& self) {
    const bool readable = machine_.memory.access(actor_of(self), from, bytes, false);
    const bool writable = machine_.memory.access(actor_of(self), to, bytes, true);
    if (readable && writable && bytes > 0) std::memmove(to, from, bytes);
  };
  machine_.submit(op, caller.host.clock);
  return cuda::kSuccess;
}

Status FakeCuda::memcpy_async(Caller& caller, void* to, const void* from, std::size_t bytes,
                              cuda::CopyKind kind, cuda::Stream stream) {
  const auto on_device = [&](const void* memory) {
    const FakeMemory::Place place = machine_.memory.find(memory);
    return place.block >= 0 && place.kind == FakeMemory::Kind::device;
  };
  const bool wrong_kind =
      kind != cuda::kAnyCopy &&
      (on_device(to) != (kind == cuda::kHostToDevice || kind == cuda::kDeviceToDevice) ||
       on_device(from) != (kind == cuda::kDeviceToHost || kind == cuda::kDeviceToDevice));
  if (bytes > 0 && wrong_kind) return cuda::kInvalidValue;
  return copy(caller, to, from, bytes, stream, "copy");
}

Status FakeCuda::memcpy_peer_async(Caller& caller, void* to, int to_device, const void* from,
                                   int from_device, std::size_t bytes, cuda::Stream stream) {
  const FakeMemory::Place target = machine_.memory.find(to);
  const FakeMemory::Place source = machine_.memory.find(from);
  if (target.device < 0 || target.device != physical(caller.process, to_device) ||
      source.device < 0 || source.device != physical(caller.process, from_device)) {
    return cuda::kInvalidValue;
  }
  return copy(caller, to, from, bytes, stream, "peer copy");
}

Status FakeCuda::memset_async(Caller& caller, void* memory, int value, std::size_t bytes,
                              cuda::Stream handle) {
  FakeStream* const stream = find(caller, handle, "memset_async");
  if (stream == nullptr) return kInvalidHandle;
  wait_for_room(caller, *stream);
  const OpPtr op = machine_.make_op(*stream, "memset");
  op->duration = machine_.draw(bytes);
  op->execute = [this, memory, value, bytes](Op& self) {
    if (machine_.memory.access(actor_of(self), memory, bytes, true) && bytes > 0) {
      std::memset(memory, value, bytes);
    }
  };
  machine_.submit(op, caller.host.clock);
  return cuda::kSuccess;
}

// --- streams and events -------------------------------------------------------------------------

Status FakeCuda::stream_create_with_priority(Caller& caller, cuda::Stream* stream, unsigned flags,
                                             int) {
  FakeStream& made = machine_.make_stream(caller.process, current_device(caller),
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

Status FakeCuda::stream_query(Caller& caller, cuda::Stream handle) {
  FakeStream* const stream = find(caller, handle, "stream_query");
  if (stream == nullptr) return kInvalidHandle;
  if (!stream->tail) return cuda::kSuccess;
  if (stream->tail->state != Op::State::done) return cuda::kNotReady;
  machine_.learn(caller, stream->tail->clock);
  return cuda::kSuccess;
}

Status FakeCuda::stream_synchronize(Caller& caller, cuda::Stream handle) {
  FakeStream* const stream = find(caller, handle, "stream_synchronize");
  if (stream == nullptr) return kInvalidHandle;
  const OpPtr tail = stream->tail;
  if (!tail) return cuda::kSuccess;
  if (!machine_.block_until(
          caller, "stream_synchronize()", [&] { return tail->state == Op::State::done; },
          [&] { return std::vector<OpPtr>{tail}; })) {
    return cuda::kLaunchFailure;
  }
  machine_.learn(caller, tail->clock);
  return cuda::kSuccess;
}

Status FakeCuda::stream_wait_event(Caller& caller, cuda::Stream handle, cuda::Event event_handle,
                                   unsigned) {
  FakeStream* const stream = find(caller, handle, "stream_wait_event");
  FakeEvent* const event = find_event(caller, event_handle, "stream_wait_event");
  if (stream == nullptr || event == nullptr) return kInvalidHandle;
  if (!event->marker) return cuda::kSuccess;
  wait_for_room(caller, *stream);
  const OpPtr op = machine_.make_op(*stream, "wait for an event");
  op->after.push_back(event->marker);
  machine_.submit(op, caller.host.clock);
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
  auto made = std::make_unique<FakeEvent>();
  made->id = static_cast<int>(++machine_.last_id);
  made->process = caller.process;
  made->device = current_device(caller);
  *event = make_handle<cuda::Event>(2, static_cast<std::uint64_t>(made->id));
  machine_.event_handles[*event] = std::move(made);
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
  wait_for_room(caller, *stream);
  event->marker = machine_.make_op(*stream, "event");
  machine_.submit(event->marker, caller.host.clock);
  return cuda::kSuccess;
}

Status FakeCuda::event_query(Caller& caller, cuda::Event handle) {
  FakeEvent* const event = find_event(caller, handle, "event_query");
  if (event == nullptr) return kInvalidHandle;
  if (!event->marker) return cuda::kSuccess;
  if (event->marker->state != Op::State::done) return cuda::kNotReady;
  machine_.learn(caller, event->marker->clock);
  return cuda::kSuccess;
}

Status FakeCuda::event_synchronize(Caller& caller, cuda::Event handle) {
  FakeEvent* const event = find_event(caller, handle, "event_synchronize");
  if (event == nullptr) return kInvalidHandle;
  const OpPtr marker = event->marker;
  if (!marker) return cuda::kSuccess;
  if (!machine_.block_until(
          caller, "event_synchronize()", [&] { return marker->state == Op::State::done; },
          [&] { return std::vector<OpPtr>{marker}; })) {
    return cuda::kLaunchFailure;
  }
  machine_.learn(caller, marker->clock);
  return cuda::kSuccess;
}

// --- other processes and devices ----------------------------------------------------------------

Status FakeCuda::device_can_access_peer(Caller& caller, int* can, int device, int peer) {
  if (physical(caller.process, device) < 0 || physical(caller.process, peer) < 0) {
    return static_cast<Status>(101);
  }
  *can = machine_.options.peer_access && device != peer ? 1 : 0;
  return cuda::kSuccess;
}

Status FakeCuda::device_enable_peer_access(Caller& caller, int peer, unsigned) {
  const int device = current_device(caller);
  const int other = physical(caller.process, peer);
  if (other < 0 || other == device) return static_cast<Status>(101);
  if (!machine_.options.peer_access) return static_cast<Status>(217);
  if (machine_.memory.has_peer_access(caller.process, device, other)) {
    return cuda::kPeerAccessAlreadyEnabled;
  }
  machine_.memory.enable_peer_access(caller.process, device, other);
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
    case cuda::kInvalidValue:
      return "invalid argument";
    case cuda::kOutOfMemory:
      return "out of memory";
    case cuda::kNoDevice:
      return "no CUDA-capable device is detected";
    case cuda::kInsufficientDriver:
      return "CUDA driver version is insufficient";
    case cuda::kNotReady:
      return "device not ready";
    case cuda::kPeerAccessAlreadyEnabled:
      return "peer access is already enabled";
    case cuda::kIllegalAddress:
      return "an illegal memory access was encountered";
    case cuda::kLaunchFailure:
      return "unspecified launch failure";
  }
  return "an error of the double";
}

Status FakeCuda::launch(Caller& caller, cuda::Stream handle, FakeGpu::Kernel kernel) {
  FakeStream* const stream = find(caller, handle, "launch");
  if (stream == nullptr) return kInvalidHandle;
  if (machine_.options.lazy_loading && !machine_.loaded.contains({caller.process, kernel.name})) {
    machine_.loading[caller.process] = &caller.host;
    const bool idle = machine_.wait_until_device_idle(caller, stream->device,
                                                      "the first launch of " + kernel.name);
    machine_.loading.erase(caller.process);
    machine_.changed();
    if (!idle) return cuda::kLaunchFailure;
    machine_.loaded.insert({caller.process, kernel.name});
  }
  wait_for_room(caller, *stream);
  const OpPtr op = machine_.make_op(*stream, kernel.name);
  op->duration = kernel.duration ? *kernel.duration : machine_.draw();
  op->gate = kernel.gate;
  op->execute = [this, kernel = std::move(kernel)](Op& self) {
    bool allowed = true;
    for (const FakeGpu::Bytes& bytes : kernel.reads) {
      allowed &=
          machine_.memory.access(actor_of(self, self.device), bytes.memory, bytes.count, false);
    }
    for (const FakeGpu::Bytes& bytes : kernel.writes) {
      allowed &=
          machine_.memory.access(actor_of(self, self.device), bytes.memory, bytes.count, true);
    }
    if (allowed && kernel.body) kernel.body();
  };
  machine_.submit(op, caller.host.clock);
  return cuda::kSuccess;
}

}  // namespace stitch::transport::gpu::test
