#include "tests/gpu/double/fake_gpu.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "stitch/transport/gpu/api_symbols.h"
#include "tests/gpu/double/fake_cuda.h"
#include "tests/gpu/double/fake_nccl.h"
#include "tests/gpu/double/machine.h"

namespace stitch::transport::gpu::test {
namespace {

// Which functions there are, so that a test cannot ask for one that is never called.
void require_function(const std::string& name) {
  static const std::set<std::string> names = {
#define STITCH_NAME(name, symbol) #name,
      STITCH_CUDA_RUNTIME_FUNCTIONS(STITCH_NAME) STITCH_CUDA_DRIVER_FUNCTIONS(STITCH_NAME)
#undef STITCH_NAME
#define STITCH_NAME(name, symbol) "nccl_" #name,
          STITCH_NCCL_FUNCTIONS(STITCH_NAME)
#undef STITCH_NAME
  };
  if (!names.contains(name)) throw std::out_of_range("no function \"" + name + "\"");
}

}  // namespace

FakeGpu::FakeGpu() : FakeGpu(Options()) {}
FakeGpu::FakeGpu(Options options) : machine_(std::make_unique<Machine>(std::move(options))) {}

FakeGpu::~FakeGpu() {
  const std::string left = take_violations();
  if (!left.empty()) ADD_FAILURE() << "violations on the double of the GPU:\n" << left;
}

const CudaApi& FakeGpu::cuda(int process) const {
  return machine_->cuda_tables.at(static_cast<std::size_t>(process));
}
const NcclApi& FakeGpu::nccl(int process) const {
  return machine_->nccl_tables.at(static_cast<std::size_t>(process));
}

// --- driving ------------------------------------------------------------------------------------

bool FakeGpu::step() {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  return machine_->step();
}

FakeGpu::Time FakeGpu::now() const {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  return machine_->now;
}

std::optional<FakeGpu::Time> FakeGpu::next_event() const {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  if (machine_->events.empty()) return std::nullopt;
  return machine_->events.begin()->first.first;
}

void FakeGpu::run_until(Time time) {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  while (!machine_->events.empty() && machine_->events.begin()->first.first <= time) {
    machine_->step();
  }
  machine_->now = std::max(machine_->now, time);
}

std::string FakeGpu::run() {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  while (machine_->step()) {
  }
  return machine_->describe_unfinished();
}

std::string FakeGpu::wait_until_idle(std::chrono::milliseconds limit) {
  if (machine_->options.driving == Driving::steps) return run();
  std::unique_lock<std::mutex> lock(machine_->mutex_);
  machine_->changed_.wait_for(lock, limit, [&] { return machine_->idle(); });
  return machine_->describe_unfinished();
}

std::string FakeGpu::describe_unfinished() const {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  return machine_->describe_unfinished();
}

// --- violations ---------------------------------------------------------------------------------

std::string FakeGpu::violations() const {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  machine_->memory.check_red_zones();
  std::string text;
  for (const std::string& violation : machine_->violations) text += violation + "\n";
  if (!text.empty()) text += "seed " + std::to_string(machine_->options.seed);
  return text;
}

std::string FakeGpu::take_violations() {
  std::string text = violations();
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  machine_->violations.clear();
  return text;
}

// --- work of users ------------------------------------------------------------------------------

cuda::Status FakeGpu::launch(int process, cuda::Stream stream, Kernel kernel) {
  return machine_->as(process, [&](Caller& caller) {
    return machine_->cuda->launch(caller, stream, std::move(kernel));
  });
}

cuda::Status FakeGpu::fill(int process, cuda::Stream stream, void* memory, std::size_t count,
                           char value) {
  Kernel kernel;
  kernel.name = "fill";
  kernel.writes = {{memory, count}};
  kernel.body = [=] { std::memset(memory, value, count); };
  return launch(process, stream, std::move(kernel));
}

cuda::Status FakeGpu::check(int process, cuda::Stream stream, const void* memory, std::size_t count,
                            char value, std::shared_ptr<bool> equal) {
  Kernel kernel;
  kernel.name = "check";
  kernel.reads = {{memory, count}};
  kernel.body = [=] {
    const auto* const bytes = static_cast<const char*>(memory);
    *equal = std::all_of(bytes, bytes + count, [=](char byte) { return byte == value; });
  };
  return launch(process, stream, std::move(kernel));
}

int FakeGpu::make_gate() {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  const int gate = static_cast<int>(machine_->gates.size()) + 1;
  machine_->gates[gate] = false;
  return gate;
}

void FakeGpu::open_gate(int gate) {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  bool& open = machine_->gates.at(gate);
  if (std::exchange(open, true)) return;
  for (const auto& [id, op] : machine_->unfinished) {
    if (op->gate != gate || op->state != Op::State::running) continue;
    machine_->schedule(op->duration.value_or(Time(0)),
                       [machine = machine_.get(), op = op] { machine->finish(op); });
  }
}

void FakeGpu::host_read(int process, const void* memory, std::size_t count) {
  machine_->as(process, [&](Caller& caller) {
    machine_->memory.access(machine_->actor(caller, "the program"), memory, count, false);
  });
}

void FakeGpu::host_write(int process, const void* memory, std::size_t count) {
  machine_->as(process, [&](Caller& caller) {
    machine_->memory.access(machine_->actor(caller, "the program"), memory, count, true);
  });
}

// --- host threads -------------------------------------------------------------------------------

FakeGpu::AsHost::AsHost(FakeGpu& world, const std::string& name)
    : before_(world.machine_->act_as(name)) {}
FakeGpu::AsHost::~AsHost() { Machine::act_as_before(before_); }

FakeGpu::Token FakeGpu::publish() {
  return machine_->as(0, [](Caller& caller) -> Token {
    return std::make_shared<const VectorClock>(caller.host.clock);
  });
}

void FakeGpu::observe(const Token& token) {
  machine_->as(0, [&](Caller& caller) {
    machine_->learn(caller, *static_cast<const VectorClock*>(token.get()));
  });
}

// --- failures -----------------------------------------------------------------------------------

void FakeGpu::inject(int process, const std::string& function, cuda::Status status, int nth) {
  require_function(function);
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  machine_->injected.push_back({process, function, static_cast<int>(status), nth});
}

void FakeGpu::inject(int process, const std::string& function, nccl::Result result, int nth) {
  require_function("nccl_" + function);
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  machine_->injected.push_back({process, "nccl_" + function, static_cast<int>(result), nth});
}

bool FakeGpu::all_injected() const {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  return machine_->injected.empty();
}

void FakeGpu::spare_this_host() {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  machine_->this_host().spared = true;
}

void FakeGpu::break_context(int process, int device, cuda::Status status) {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  const int physical = machine_->cuda->physical(process, device);
  machine_->broken[{process, physical}] = status;
  machine_->nccl->context_broke(process, physical);
  machine_->drop_work(process, physical);
}

void FakeGpu::kill(int process) {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  machine_->nccl->process_died(process);
  machine_->drop_work(process, -1);
  machine_->memory.release_process(process);
  std::erase_if(machine_->stream_handles,
                [&](const auto& entry) { return entry.second->process == process; });
  std::erase_if(machine_->event_handles,
                [&](const auto& entry) { return entry.second->process == process; });
}

void FakeGpu::set_async_error(int process, nccl::Comm comm, nccl::Result result) {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  FakeComm& found = *machine_->nccl->comms.at(comm);
  if (found.process != process) throw std::out_of_range("the communicator is another process's");
  found.state = result;
  machine_->changed();
}

void FakeGpu::set_sync_on_alloc(bool sync) {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  machine_->options.sync_on_alloc = sync;
}

void FakeGpu::set_nccl_version(int process, int version) {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  machine_->nccl->versions[process] = version;
}

void FakeGpu::set_visible_devices(int process, std::vector<int> devices) {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  machine_->visible[process] = std::move(devices);
}

void FakeGpu::set_capturing(int process, cuda::Stream stream, bool capturing) {
  machine_->as(process, [&](Caller& caller) {
    FakeStream* const found = machine_->cuda->find(caller, stream, "set_capturing");
    if (found != nullptr) found->capturing = capturing;
  });
}

// --- what was called ----------------------------------------------------------------------------

std::size_t FakeGpu::calls(const std::string& function, int process) const {
  require_function(function);
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  std::size_t count = 0;
  for (const auto& [key, number] : machine_->calls) {
    if (key.second == function && (process < 0 || key.first == process)) count += number;
  }
  return count;
}

std::uint64_t FakeGpu::calls_of_this_host() const {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  return machine_->this_host().calls;
}

std::vector<int> FakeGpu::contexts(int process) const {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  std::vector<int> devices;
  for (const auto& [owner, device] : machine_->contexts) {
    if (owner == process) devices.push_back(device);
  }
  return devices;
}

std::size_t FakeGpu::nccl_launching_hosts(int process, int device) const {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  const int physical = machine_->cuda->physical(process, device);
  return machine_->nccl->launching_hosts[{process, physical}].size();
}

std::size_t FakeGpu::open_communicators(int process) const {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  std::size_t count = 0;
  for (const auto& [handle, comm] : machine_->nccl->comms) {
    if (!comm->destroyed && (process < 0 || comm->process == process)) ++count;
  }
  return count;
}

std::size_t FakeGpu::live_streams(int process) const {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  std::size_t count = 0;
  for (const auto& [handle, stream] : machine_->stream_handles) {
    if (process < 0 || stream->process == process) ++count;
  }
  return count;
}

std::size_t FakeGpu::live_events(int process) const {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  std::size_t count = 0;
  for (const auto& [handle, event] : machine_->event_handles) {
    if (process < 0 || event->process == process) ++count;
  }
  return count;
}

std::size_t FakeGpu::device_memory_used(int device) const {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  return machine_->memory.used(device);
}

std::size_t FakeGpu::pinned_memory_used() const {
  const std::unique_lock<std::mutex> lock(machine_->mutex_);
  return machine_->memory.pinned();
}

std::uint64_t FakeGpu::seed() const { return machine_->options.seed; }

}  // namespace stitch::transport::gpu::test
