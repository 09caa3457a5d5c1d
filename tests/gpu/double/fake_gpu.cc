#include "tests/gpu/double/fake_gpu.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "tests/gpu/double/fake_cuda.h"
#include "tests/gpu/double/fake_nccl.h"
#include "tests/gpu/double/machine.h"

namespace stitch::transport::gpu::test {
namespace {

using Lock = std::lock_guard<std::mutex>;

// Which functions there are, so that a test cannot ask for one that is never called.
const std::string& existing(const std::string& name) {
  static const std::set<std::string> names = {
#define STITCH_NAME(name, symbol) #name,
      STITCH_CUDA_RUNTIME_FUNCTIONS(STITCH_NAME) STITCH_CUDA_DRIVER_FUNCTIONS(STITCH_NAME)
#undef STITCH_NAME
#define STITCH_NAME(name, symbol) "nccl_" #name,
          STITCH_NCCL_FUNCTIONS(STITCH_NAME)
#undef STITCH_NAME
  };
  if (!names.contains(name)) throw std::out_of_range("no function \"" + name + "\"");
  return name;
}

}  // namespace

FakeGpu::FakeGpu() : FakeGpu(Options()) {}
FakeGpu::FakeGpu(Options options) : machine_(std::make_unique<Machine>(options)) {}

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

std::string FakeGpu::wait_until_idle(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(machine_->mutex_);
  machine_->changed_.wait_for(lock, limit, [&] { return machine_->idle(); });
  return machine_->describe_unfinished();
}

std::string FakeGpu::describe_unfinished() const {
  const Lock lock(machine_->mutex_);
  return machine_->describe_unfinished();
}

std::string FakeGpu::violations() const {
  const Lock lock(machine_->mutex_);
  machine_->memory.check_red_zones();
  std::string text;
  for (const std::string& violation : machine_->violations) text += violation + "\n";
  if (!text.empty()) text += "seed " + std::to_string(machine_->options.seed);
  return text;
}

std::string FakeGpu::take_violations() {
  std::string text = violations();
  const Lock lock(machine_->mutex_);
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
                           char value, int gate) {
  return launch(process, stream,
                {"fill", {}, {{memory, count}}, [=] { std::memset(memory, value, count); }, gate});
}

cuda::Status FakeGpu::check(int process, cuda::Stream stream, const void* memory, std::size_t count,
                            char value, std::shared_ptr<bool> equal) {
  return launch(process, stream, {"check", {{memory, count}}, {}, [=] {
                                    const auto* const bytes = static_cast<const char*>(memory);
                                    *equal = std::all_of(bytes, bytes + count,
                                                         [=](char b) { return b == value; });
                                  }});
}

int FakeGpu::make_gate() {
  const Lock lock(machine_->mutex_);
  const int gate = static_cast<int>(machine_->gates.size()) + 1;
  machine_->gates[gate] = false;
  return gate;
}

void FakeGpu::open_gate(int gate) {
  const Lock lock(machine_->mutex_);
  bool& open = machine_->gates.at(gate);
  if (std::exchange(open, true)) return;
  for (const auto& [id, op] : machine_->unfinished) {
    if (op->gate != gate || op->state != Op::State::running) continue;
    machine_->schedule(op->duration, [machine = machine_.get(), op = op] { machine->finish(op); });
  }
}

int FakeGpu::hold(int process, cuda::Stream stream) {
  const int gate = make_gate();
  EXPECT_EQ(launch(process, stream, {"hold", {}, {}, nullptr, gate}), cuda::kSuccess);
  return gate;
}

bool FakeGpu::has_held_work(int process, int device) const {
  const Lock lock(machine_->mutex_);
  std::set<const FakeStream*> held;
  for (const auto& [id, op] : machine_->unfinished) {  // as they were submitted
    if (op->process != process || op->device != device) continue;
    if (op->gate != 0) {
      held.insert(op->stream);
    } else if (held.contains(op->stream)) {
      return true;
    }
  }
  return false;
}

// --- what libtorch calls ------------------------------------------------------------------------

int FakeGpu::current_device(int process) const {
  return machine_->as(process, [](Caller& caller) { return caller.in.device; });
}

void FakeGpu::set_device_lazily(int process, int device) {
  machine_->as(process, [&](Caller& caller) { caller.in.device = device; });
}

cuda::Status FakeGpu::stream_wait_event(int process, cuda::Stream stream, cuda::Event event) {
  return machine_->as(process, [&](Caller& caller) {
    return machine_->cuda->stream_wait_event(caller, stream, event);
  });
}

// --- failures -----------------------------------------------------------------------------------

void FakeGpu::inject(int process, const std::string& function, cuda::Status status, int nth) {
  const Lock lock(machine_->mutex_);
  machine_->injected.push_back({process, existing(function), static_cast<int>(status), nth});
}

void FakeGpu::inject(int process, const std::string& function, nccl::Result result, int nth) {
  const Lock lock(machine_->mutex_);
  machine_->injected.push_back(
      {process, existing("nccl_" + function), static_cast<int>(result), nth});
}

bool FakeGpu::all_injected() const {
  const Lock lock(machine_->mutex_);
  return machine_->injected.empty();
}

void FakeGpu::spare_this_host() {
  const Lock lock(machine_->mutex_);
  machine_->this_host().spared = true;
}

void FakeGpu::break_context(int process, int device, cuda::Status status) {
  const Lock lock(machine_->mutex_);
  machine_->broken[{process, device}] = status;
  machine_->nccl->context_broke(process, device);
  machine_->drop_work(process, device);
}

void FakeGpu::heal() {
  const Lock lock(machine_->mutex_);
  machine_->broken.clear();
}

void FakeGpu::set_sync_on_alloc(bool sync) {
  const Lock lock(machine_->mutex_);
  machine_->options.sync_on_alloc = sync;
}

void FakeGpu::set_nccl_version(int process, int version) {
  const Lock lock(machine_->mutex_);
  machine_->nccl->versions[process] = version;
}

void FakeGpu::set_capturing(int process, cuda::Stream stream, bool capturing) {
  machine_->as(process, [&](Caller& caller) {
    FakeStream* const found = machine_->cuda->find(caller, stream, "set_capturing");
    if (found != nullptr) found->capturing = capturing;
  });
}

// --- what was called ----------------------------------------------------------------------------

std::size_t FakeGpu::calls(const std::string& function, int process) const {
  existing(function);
  const Lock lock(machine_->mutex_);
  std::size_t count = 0;
  for (const auto& [key, number] : machine_->calls) {
    if (key.second == function && (process < 0 || key.first == process)) count += number;
  }
  return count;
}

std::uint64_t FakeGpu::calls_of_this_host() const {
  const Lock lock(machine_->mutex_);
  return machine_->this_host().calls;
}

std::vector<int> FakeGpu::take_contexts(int process) {
  const Lock lock(machine_->mutex_);
  std::vector<int> devices;
  for (const auto& [owner, device] : machine_->contexts) {
    if (owner == process) devices.push_back(device);
  }
  std::erase_if(machine_->contexts, [&](const auto& at) { return at.first == process; });
  return devices;
}

std::size_t FakeGpu::open_communicators(int process) const {
  const Lock lock(machine_->mutex_);
  const auto& all = machine_->nccl->comms;
  return static_cast<std::size_t>(std::count_if(all.begin(), all.end(), [&](const auto& at) {
    return !at.second->destroyed && (process < 0 || at.second->process == process);
  }));
}

std::size_t FakeGpu::live_streams() const {
  const Lock lock(machine_->mutex_);
  return machine_->stream_handles.size();
}

std::size_t FakeGpu::live_events() const {
  const Lock lock(machine_->mutex_);
  return machine_->event_handles.size();
}

std::size_t FakeGpu::device_memory_used(int device) const {
  const Lock lock(machine_->mutex_);
  return machine_->memory.used(device);
}

std::size_t FakeGpu::pinned_memory_used() const {
  const Lock lock(machine_->mutex_);
  return machine_->memory.used(-1);
}

}  // namespace stitch::transport::gpu::test
