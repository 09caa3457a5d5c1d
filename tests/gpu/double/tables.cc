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

bool outlives_the_context(const std::string& name) {
  return name == "get_device_count" || name == "get_device" || name == "set_device" ||
         name == "runtime_get_version" || name == "driver_get_version";
}

template <typename Part>
Part& part(Machine& machine) {
  if constexpr (std::is_same_v<Part, FakeCuda>) {
    return *machine.cuda;
  } else {
    return *machine.nccl;
  }
}

template <int process, Name name, auto method>
struct Entry;

template <int process, Name name, typename Part, typename Result, typename... Arguments,
          Result (Part::*method)(Caller&, Arguments...)>
struct Entry<process, name, method> {
  static Result call(Arguments... arguments) {
    Machine& machine = Machine::current();
    return machine.as(process, [&](Caller& caller) -> Result {
      constexpr bool is_cuda = std::is_same_v<Part, FakeCuda>;
      const std::string function = (is_cuda ? "" : "nccl_") + std::string(name.text);
      ++machine.calls[{process, function}];
      const auto loaded = [&] {
        const auto loading = machine.loading.find(process);
        return loading == machine.loading.end() || loading->second == &caller.host;
      };
      machine.block_until(caller, function + "(), while a kernel is loaded", loaded,
                          [] { return std::vector<OpPtr>{}; });
      if constexpr (std::is_same_v<Result, cuda::Status>) {
        const auto failed = failure(machine, caller, function, !outlives_the_context(function));
        const bool asks = function == "get_last_error" || function == "peek_last_error";
        const Result status = failed ? static_cast<Result>(*failed)
                                     : (part<Part>(machine).*method)(caller, arguments...);
        if (status != cuda::kSuccess && status != cuda::kNotReady && !asks) {
          caller.in.last_error = status;
        }
        return status;
      } else if constexpr (std::is_same_v<Result, nccl::Result>) {
        const auto failed = failure(machine, caller, function, false);
        if (failed) return static_cast<Result>(*failed);
      }
      return (part<Part>(machine).*method)(caller, arguments...);
    });
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
