// The tables of functions: one function of its own for each process, so that a plain function
// pointer knows who calls.
#include <algorithm>
#include <cstddef>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <utility>

#include "tests/gpu/double/fake_cuda.h"
#include "tests/gpu/double/fake_nccl.h"
#include "tests/gpu/double/machine.h"

namespace stitch::transport::gpu::test {
namespace {

template <std::size_t length>
struct Name {
  char text[length];
  consteval Name(const char (&name)[length]) { std::copy_n(name, length, text); }
};

// What an injected or sticky error makes this call return; nullopt: nothing stands in its way.
std::optional<int> failure(Machine& machine, const Caller& caller, const std::string& name,
                           bool sticky) {
  for (auto injected = machine.injected.begin(); injected != machine.injected.end(); ++injected) {
    if (injected->process != caller.process || injected->function != name || caller.host.spared)
      continue;
    if (--injected->left > 0) continue;
    const int status = injected->status;
    machine.injected.erase(injected);
    return status;
  }
  if (!sticky) return std::nullopt;
  const auto broken = machine.broken.find({caller.process, caller.in.device});
  if (broken == machine.broken.end()) return std::nullopt;
  return static_cast<int>(broken->second);
}

// Those that do not ask the driver for the current device's context.
bool outlives_the_context(const std::string& name) {
  return name == "get_last_error" || name == "get_device_count" || name == "set_device" ||
         name == "runtime_get_version";
}

// Those that do not create the context of the thread's current device. NCCL's functions that work
// on a communicator return to the device that was current before, and so create its context.
bool creates_no_context(const std::string& name) {
  static const std::set<std::string> names = {
      "get_device_count",    "runtime_get_version", "get_last_error",
      "get_error_name",      "get_error_string",    "device_get_uuid",
      "set_device",  // of another, which it does itself
      "nccl_get_version",    "nccl_get_unique_id",  "nccl_get_error_string",
      "nccl_get_last_error", "nccl_group_start",    "nccl_comm_get_async_error",
  };
  return names.contains(name);
}

// Those that a capture of another thread does not forbid in the default mode: they only put work on
// a stream that is not captured, or ask for what does not depend on the device. Calls
// of NCCL pass for safe: its own calls of CUDA are in the relaxed mode, but for some of threads
// that it has while a communicator is opened, which the double does not have.
bool safe_during_capture(const std::string& name) {
  static const std::set<std::string> names = {
      "get_device_count",
      "set_device",
      "runtime_get_version",
      "get_last_error",
      "get_error_name",
      "get_error_string",
      "device_get_uuid",
      "memcpy_async",
      "memcpy_peer_async",
      "memset_async",
      "stream_is_capturing",
      "event_record",
      "event_create_with_flags",
      "device_can_access_peer",
      "thread_exchange_stream_capture_mode",
  };
  return names.contains(name);
}

// In the default mode of a thread, a call that might be unsafe ends all captures that other threads
// have begun in theirs.
std::optional<int> forbidden_by_capture(Machine& machine, const Caller& caller,
                                        const std::string& name) {
  if (caller.in.capture_mode != cuda::kCaptureGlobal || safe_during_capture(name))
    return std::nullopt;
  for (const auto& [handle, stream] : machine.stream_handles) {
    if (stream->process != caller.process || !stream->capturing) continue;
    machine.violation(name + "() on host " + caller.host.name + " while stream " +
                      std::to_string(stream->id) +
                      " is captured in the global mode: the capture is invalid");
    constexpr int kStreamCaptureUnsupported = 900;
    return kStreamCaptureUnsupported;
  }
  return std::nullopt;
}

template <typename Part>
Part& part(Machine& machine) {
  if constexpr (std::is_same_v<Part, FakeCuda>) {
    return *machine.cuda;
  } else {
    return *machine.nccl;
  }
}

// What surrounds each call: the lock, the caller, and what stands in its way.
struct Call {
  Call(int process, const char* function, bool is_cuda)
      : machine(Machine::current()),
        lock(machine.mutex_),
        caller(machine.enter(process)),
        name((is_cuda ? "" : "nccl_") + std::string(function)) {
    ++machine.calls[{process, name}];
    ++caller.host.calls;
    if (!creates_no_context(name)) machine.contexts.insert({process, caller.in.device});
    failed = failure(machine, caller, name, is_cuda && !outlives_the_context(name));
    if (!failed && is_cuda) failed = forbidden_by_capture(machine, caller, name);
    if (failed && !is_cuda && caller.in.group) caller.in.group_error = *failed;
    if (failed && name == "nccl_group_end") caller.in.group.reset();  // it is over all the same
  }

  // Notes a status for get_last_error().
  cuda::Status ended(cuda::Status status) {
    if (status != cuda::kSuccess && name != "get_last_error") {
      caller.in.last_error = status;
    }
    return status;
  }
  template <typename Result>
  Result ended(Result result) {
    return result;
  }

  Machine& machine;
  const std::unique_lock<std::mutex> lock;  // before anything of the machine is looked at
  Caller caller;
  const std::string name;
  std::optional<int> failed;
};

template <int process, Name name, auto method>
struct Entry;

template <int process, Name name, typename Part, typename Result, typename... Arguments,
          Result (Part::*method)(Caller&, Arguments...)>
struct Entry<process, name, method> {
  static Result call(Arguments... arguments) {
    Call call(process, name.text, std::is_same_v<Part, FakeCuda>);
    if constexpr (!std::is_pointer_v<Result>) {
      if (call.failed) return call.ended(static_cast<Result>(*call.failed));
    }
    return call.ended((part<Part>(call.machine).*method)(call.caller, arguments...));
  }
};

template <int process>
void fill(CudaApi& api) {
#define STITCH_ENTRY(name, symbol) api.name = &Entry<process, #name, &FakeCuda::name>::call;
  STITCH_CUDA_RUNTIME_FUNCTIONS(STITCH_ENTRY)
  STITCH_CUDA_DRIVER_FUNCTIONS(STITCH_ENTRY)
#undef STITCH_ENTRY
}

template <int process>
void fill(NcclApi& api) {
#define STITCH_ENTRY(name, symbol) api.name = &Entry<process, #name, &FakeNccl::name>::call;
  STITCH_NCCL_FUNCTIONS(STITCH_ENTRY)
#undef STITCH_ENTRY
}

}  // namespace

void fill_tables(Machine& machine) {
  [&]<int... process>(std::integer_sequence<int, process...>) {
    (fill<process>(machine.cuda_tables[process]), ...);
    (fill<process>(machine.nccl_tables[process]), ...);
  }
  (std::make_integer_sequence<int, FakeGpu::kMaxProcesses>());
}

}  // namespace stitch::transport::gpu::test
