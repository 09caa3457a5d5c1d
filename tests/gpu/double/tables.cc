// The tables of functions: one function of its own for each process, so that a plain function
// pointer knows who calls.
#include <algorithm>
#include <cstddef>
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
#define STITCH_ENTRY(name) api.name = &Entry<process, #name, &FakeCuda::name>::call;
  STITCH_ENTRY(get_device_count)
  STITCH_ENTRY(get_device)
  STITCH_ENTRY(set_device)
  STITCH_ENTRY(runtime_get_version)
  STITCH_ENTRY(driver_get_version)
  STITCH_ENTRY(device_get_pci_bus_id)
  STITCH_ENTRY(device_get_uuid)
  STITCH_ENTRY(mem_get_info)
  STITCH_ENTRY(device_get_stream_priority_range)
  STITCH_ENTRY(device_synchronize)
  STITCH_ENTRY(malloc)
  STITCH_ENTRY(free)
  STITCH_ENTRY(host_alloc)
  STITCH_ENTRY(free_host)
  STITCH_ENTRY(host_register)
  STITCH_ENTRY(host_unregister)
  STITCH_ENTRY(memcpy_async)
  STITCH_ENTRY(memcpy_peer_async)
  STITCH_ENTRY(memset_async)
  STITCH_ENTRY(stream_create_with_priority)
  STITCH_ENTRY(stream_destroy)
  STITCH_ENTRY(stream_query)
  STITCH_ENTRY(stream_synchronize)
  STITCH_ENTRY(stream_wait_event)
  STITCH_ENTRY(stream_is_capturing)
  STITCH_ENTRY(event_create_with_flags)
  STITCH_ENTRY(event_destroy)
  STITCH_ENTRY(event_record)
  STITCH_ENTRY(event_query)
  STITCH_ENTRY(event_synchronize)
  STITCH_ENTRY(ipc_get_mem_handle)
  STITCH_ENTRY(ipc_open_mem_handle)
  STITCH_ENTRY(ipc_close_mem_handle)
  STITCH_ENTRY(device_can_access_peer)
  STITCH_ENTRY(device_enable_peer_access)
  STITCH_ENTRY(get_last_error)
  STITCH_ENTRY(peek_last_error)
  STITCH_ENTRY(get_error_name)
  STITCH_ENTRY(get_error_string)
#undef STITCH_ENTRY
}

template <int process>
void fill(NcclApi& api) {
#define STITCH_ENTRY(name) api.name = &Entry<process, #name, &FakeNccl::name>::call;
  STITCH_ENTRY(get_version)
  STITCH_ENTRY(get_unique_id)
  STITCH_ENTRY(comm_init_rank_config)
  STITCH_ENTRY(comm_get_async_error)
  STITCH_ENTRY(comm_finalize)
  STITCH_ENTRY(comm_destroy)
  STITCH_ENTRY(comm_abort)
  STITCH_ENTRY(send)
  STITCH_ENTRY(recv)
  STITCH_ENTRY(group_start)
  STITCH_ENTRY(group_end)
  STITCH_ENTRY(get_error_string)
  STITCH_ENTRY(get_last_error)
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
