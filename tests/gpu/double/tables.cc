// The tables of functions: one function of its own for each process, so that a plain function
// pointer knows who calls.
#include <algorithm>
#include <cstddef>
#include <string>
#include <type_traits>
#include <utility>

#include "stitch/transport/gpu/api_symbols.h"
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
    if (injected->process != caller.process || injected->function != name) continue;
    if (--injected->left > 0) continue;
    const int status = injected->status;
    machine.injected.erase(injected);
    return status;
  }
  if (!sticky) return std::nullopt;
  const auto broken = machine.broken.find({caller.process, machine.cuda->current_device(caller)});
  if (broken == machine.broken.end()) return std::nullopt;
  return static_cast<int>(broken->second);
}

// Those that do not ask the driver for the current device's context.
bool outlives_the_context(const std::string& name) {
  return name == "get_last_error" || name == "get_device_count" || name == "get_device" ||
         name == "set_device" || name == "runtime_get_version" || name == "driver_get_version";
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
    const auto loaded = [&] {
      const auto loading = machine.loading.find(process);
      return loading == machine.loading.end() || loading->second == &caller.host;
    };
    machine.block_until(caller, name + "(), while a kernel is loaded", loaded,
                        [] { return std::vector<OpPtr>{}; });
    failed = failure(machine, caller, name, is_cuda && !outlives_the_context(name));
    if (failed && !is_cuda && caller.in.group_depth > 0) caller.in.group_error = *failed;
  }

  // Notes a status for get_last_error().
  cuda::Status ended(cuda::Status status) {
    if (status != cuda::kSuccess && status != cuda::kNotReady && name != "get_last_error") {
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
