#include "tests/gpu/double_torch_device.h"

#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "stitch/rpc/gpu/device_bridge.h"
#include "stitch/transport/gpu/gpu_libraries.h"
#include "tests/gpu/device_on_cpu.h"

// Signatures of virtual functions differ between versions of libtorch: both are there.
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wunknown-warning-option"
#pragma GCC diagnostic ignored "-Winconsistent-missing-override"
#pragma GCC diagnostic ignored "-Woverloaded-virtual"

namespace stitch::testing::double_device {

namespace {

namespace cuda = transport::gpu::cuda;
using device_on_cpu::as_cpu;
using device_on_cpu::as_cpu_if_on_device;
using device_on_cpu::copy_on_cpu;
using device_on_cpu::indexed;
using device_on_cpu::make_stream;
using device_on_cpu::OnDevice;
using transport::gpu::CudaApi;
using transport::gpu::GpuLibraries;
using transport::gpu::RelaxedCapture;
using transport::gpu::test::FakeGpu;
using Kernel = FakeGpu::Kernel;

constexpr int kPoolStreams = 32;  // of each priority, as in libtorch
constexpr int kProcess = 0;

const CudaApi& api() { return gpu().cuda(kProcess); }

void check(cuda::Status status) {
  TORCH_CHECK(status == cuda::kSuccess, "CUDA error: ", api().get_error_string(status));
}

// ---- streams: the id of a stream is its handle, 0 for the default one

cuda::Stream handle(const c10::Stream& stream) {
  return reinterpret_cast<cuda::Stream>(static_cast<std::uintptr_t>(stream.id()));
}
thread_local std::array<std::int64_t, kDevices> current_streams{};

std::vector<cuda::Stream>& pool_of(c10::Device device, bool high) {
  static std::mutex mutex;
  static std::map<std::pair<int, bool>, std::vector<cuda::Stream>> pools;
  const std::lock_guard lock(mutex);
  auto& streams = pools[{device.index(), high}];
  if (streams.empty()) {
    const OnDevice on(device.index());
    streams.resize(kPoolStreams);
    for (auto& stream : streams)
      check(api().stream_create_with_priority(&stream, cuda::kStreamNonBlocking, high ? -1 : 0));
  }
  return streams;
}

cuda::Event record(const c10::Stream& stream) {
  const OnDevice on(stream.device_index());
  cuda::Event event = nullptr;
  check(api().event_create_with_flags(&event, cuda::kEventDisableTiming));
  check(api().event_record(event, handle(stream)));
  return event;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override {
    return {c10::kCUDA, static_cast<c10::DeviceIndex>(current_device())};
  }
  void setDevice(c10::Device device) const override { check(api().set_device(device.index())); }
  // Without a context where there is none, as c10::cuda::MaybeSetDevice().
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    gpu().set_device_lazily(kProcess, device.index());
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return current_stream(device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return make_stream(indexed(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    static std::atomic<int> next{0};
    const c10::Device exact = indexed(device);
    const cuda::Stream chosen =
        pool_of(exact, high)[static_cast<std::size_t>(next++ % kPoolStreams)];
    return make_stream(exact, static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(chosen)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    auto& current = current_streams.at(static_cast<std::size_t>(stream.device_index()));
    return make_stream(stream.device(), std::exchange(current, stream.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event != nullptr) destroyEvent(*event, stream.device_index());
    *event = double_device::record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const OnDevice on(stream.device_index());
    check(gpu().stream_wait_event(kProcess, handle(stream), static_cast<cuda::Event>(event)));
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const cuda::Status status = api().event_query(static_cast<cuda::Event>(event));
    if (status != cuda::kNotReady) check(status);
    return status == cuda::kSuccess;
  }
  // Where it is on another device, libtorch goes there and back, and the way back creates a
  // context.
  void destroyEvent(void* event, const c10::DeviceIndex device) const noexcept override {
    const OnDevice on(device);
    if (event != nullptr) static_cast<void>(api().event_destroy(static_cast<cuda::Event>(event)));
  }
  bool queryStream(const c10::Stream& stream) const override {
    const OnDevice on(stream.device_index());
    const cuda::Status status = api().stream_query(handle(stream));
    if (status != cuda::kNotReady) check(status);
    return status == cuda::kSuccess;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    const OnDevice on(stream.device_index());
    check(api().stream_synchronize(handle(stream)));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;
};

// ---- memory

struct Block {
  c10::Stream stream;
  bool borrowed = false;  // its stream is not libtorch's, and may end before it
  std::vector<c10::Stream> recorded;
};
struct Freed {
  void* memory = nullptr;
  int device = 0;
  std::vector<cuda::Event> until;
};
struct Memory {
  std::mutex mutex;
  std::map<const void*, Block> blocks;
  std::vector<Freed> freed;
  std::map<std::int64_t, bool> borrowed_streams;  // those that came by from_raw()
  int failing = 0;
  static Memory& get() {
    static auto* const memory = new Memory;  // tensors may be freed by destructors of statics
    return *memory;
  }
};

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  Memory& memory = Memory::get();
  const std::lock_guard lock(memory.mutex);
  const auto found = memory.blocks.find(data.get());
  if (found != memory.blocks.end()) found->second.recorded.push_back(stream);
}

// Gives back what no stream uses any more. Without the lock: memory of others is not touched. As
// libtorch's allocator, it ends no capture of another thread.
void release_freed(Memory& memory) {
  const RelaxedCapture relaxed(&api());
  std::vector<Freed> freed;
  {
    const std::lock_guard lock(memory.mutex);
    freed = std::exchange(memory.freed, {});
  }
  std::vector<Freed> left;
  for (Freed& each : freed) {
    while (!each.until.empty() && api().event_query(each.until.back()) == cuda::kSuccess) {
      static_cast<void>(api().event_destroy(each.until.back()));
      each.until.pop_back();
    }
    if (!each.until.empty()) {
      left.push_back(std::move(each));
      continue;
    }
    const OnDevice on(each.device);
    static_cast<void>(api().free(each.memory));
  }
  const std::lock_guard lock(memory.mutex);
  for (Freed& each : left) memory.freed.push_back(std::move(each));
}

}  // namespace

void free_memory(void* data) {
  if (data == nullptr) return;
  const RelaxedCapture relaxed(&api());
  Memory& memory = Memory::get();
  std::optional<Block> block;
  {
    const std::lock_guard lock(memory.mutex);
    const auto node = memory.blocks.extract(data);
    block.emplace(node.mapped());
  }
  Freed freed{data, block->stream.device_index(), {}};
  try {
    // A borrowed stream has ended what it had to do here: the host has seen it.
    if (!block->borrowed) freed.until.push_back(record(block->stream));
    for (const auto& stream : block->recorded) freed.until.push_back(record(stream));
  } catch (const std::exception&) {
    return;  // the device has failed, and its memory with it
  }
  {
    const std::lock_guard lock(memory.mutex);
    memory.freed.push_back(std::move(freed));
  }
  release_freed(memory);
}

c10::DataPtr allocate(std::size_t bytes) {
  Memory& memory = Memory::get();
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(current_device()));
  if (bytes == 0) return {nullptr, device};
  const RelaxedCapture relaxed(&api());
  release_freed(memory);
  void* data = nullptr;
  {
    const std::lock_guard lock(memory.mutex);
    if (memory.failing > 0) {
      --memory.failing;
      TORCH_CHECK(false, "CUDA out of memory. Tried to allocate ", bytes, " bytes");
    }
  }
  const cuda::Status status = api().malloc(&data, bytes);
  TORCH_CHECK(status != cuda::kOutOfMemory, "CUDA out of memory. Tried to allocate ", bytes);
  check(status);
  const c10::Stream stream = current_stream(device);
  const std::lock_guard lock(memory.mutex);
  memory.blocks.insert_or_assign(data,
                                 Block{stream, memory.borrowed_streams.contains(stream.id()), {}});
  return {data, data, &free_memory, device};
}

namespace {

// From its first to its last element.
FakeGpu::Bytes span_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) return {};
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {tensor.data_ptr(), static_cast<std::size_t>(last + 1) * tensor.element_size()};
}
void launch(const c10::Stream& stream, Kernel kernel) {
  std::erase_if(kernel.reads, [](const auto& bytes) { return bytes.count == 0; });
  std::erase_if(kernel.writes, [](const auto& bytes) { return bytes.count == 0; });
  const OnDevice on(stream.device_index());
  check(gpu().launch(kProcess, handle(stream), std::move(kernel)));
}

// ---- operators

void synchronize(const c10::Stream& stream) {
  const OnDevice on(stream.device_index());
  check(api().stream_synchronize(handle(stream)));
}

// As libtorch does it: one stream of the source copies, after what that of the destination has
// queued, which waits for it.
void copy_between(const at::Tensor& to, const at::Tensor& from) {
  if (to.numel() == 0) return;
  const c10::Stream source = current_stream(from.device());
  const c10::Stream destination = current_stream(to.device());
  const auto dense_on = [&](c10::Device device) {
    return at::empty(to.sizes(), at::TensorOptions().dtype(to.scalar_type()).device(device));
  };
  const at::Tensor here = dense_on(from.device());
  const at::Tensor there = dense_on(to.device());
  copy_tensor(here, from, true);
  const auto order = [](const c10::Stream& earlier, const c10::Stream& later) {
    const cuda::Event event = record(earlier);
    const OnDevice on(later.device_index());
    check(gpu().stream_wait_event(kProcess, handle(later), event));
    check(api().event_destroy(event));
  };
  order(destination, source);
  {
    const OnDevice on(source.device_index());
    check(api().memcpy_peer_async(there.data_ptr(), to.device().index(), here.data_ptr(),
                                  from.device().index(), there.nbytes(), handle(source)));
  }
  order(source, destination);
  c10::impl::VirtualGuardImpl(c10::kCUDA).recordDataPtrOnStream(there.storage().data_ptr(), source);
  copy_tensor(to, there, true);
}

}  // namespace

int current_device() { return gpu().current_device(kProcess); }
void make_current(int device) { check(api().set_device(device)); }

void copy_tensor(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const c10::Stream stream = current_stream(to.is_cuda() ? to.device() : from.device());
  if (to.is_cuda() && from.is_cuda() && to.device() != from.device()) {
    copy_between(to, from);
  } else {
    Kernel kernel;
    kernel.name = "copy_";
    if (from.is_cuda()) kernel.reads.push_back(span_of(from));
    if (to.is_cuda()) kernel.writes.push_back(span_of(to));
    kernel.body = [to_cpu = as_cpu_if_on_device(to), from_cpu = as_cpu_if_on_device(from)] {
      copy_on_cpu(to_cpu, from_cpu);
    };
    launch(stream, std::move(kernel));
  }
  if (!non_blocking) synchronize(stream);
}

void compute(const std::string& name, c10::Device where, const std::vector<at::Tensor>& read,
             const std::vector<at::Tensor>& written, const std::function<void()>& work) {
  Kernel kernel;
  kernel.name = name;
  for (const at::Tensor& tensor : read) kernel.reads.push_back(span_of(tensor));
  for (const at::Tensor& tensor : written) kernel.writes.push_back(span_of(tensor));
  kernel.body = work;
  const c10::Stream stream = current_stream(where);
  launch(stream, std::move(kernel));
  synchronize(stream);
}

namespace {

// ---- the bridge

c10::Stream from_raw(void* stream, c10::DeviceIndex device) {
  const auto id = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(stream));
  Memory& memory = Memory::get();
  const std::lock_guard lock(memory.mutex);
  memory.borrowed_streams[id] = true;
  return make_stream({c10::kCUDA, device}, id);
}
void* raw(const c10::Stream& stream) { return handle(stream); }

std::atomic<bool> apart{false};
std::atomic<bool> hosts{false};
transport::gpu::ProcessIdentity identity(std::uint32_t worker) {
  auto same = transport::gpu::this_process();
  if (apart) same.process += worker;
  if (hosts) same.host[0] += worker;
  return same;
}

const rpc::DeviceBridge kBridge{&from_raw, &raw, &identity};

}  // namespace

FakeGpu& gpu() {
  static auto* const made = [] {
    FakeGpu::Options options;
    options.devices = kDevices;
    // Tests hold a stream and wait for others meanwhile: those must not share its hardware queue.
    options.hardware_queues = 0;
    options.device_memory = std::size_t{8} << 30;
    const char* const seed = std::getenv("DOUBLE_SEED");
    if (seed != nullptr) options.seed = std::strtoull(seed, nullptr, 10);
    return new FakeGpu(options);
  }();
  return *made;
}

namespace {

struct EachTest final : ::testing::EmptyTestEventListener {
  void OnTestEnd(const ::testing::TestInfo&) override {
    workers_are_processes(false);
    EXPECT_EQ(take_violations(), "");
  }
};

}  // namespace

bool install(bool transfers) {
  static const Guard guard;
  static const c10::impl::DeviceGuardImplRegistrar registrar(c10::kCUDA, &guard);
  c10::SetAllocator(c10::kCUDA, device_on_cpu::allocator());
  static const GpuLibraries libraries(&api(), &gpu().nccl(kProcess), "");
  static const GpuLibraries::Override override(libraries);
  [[maybe_unused]] static const bool listening = [] {
    ::testing::UnitTest::GetInstance()->listeners().Append(new EachTest);
    return true;
  }();
  return !transfers || rpc::set_device_bridge(&kBridge);
}

void workers_are_processes(bool are, bool on_hosts) {
  apart = are;
  hosts = on_hosts;
}

void fill_later(const at::Tensor& tensor, float value, int gate) {
  Kernel kernel;
  kernel.name = "fill_later";
  kernel.writes.push_back(span_of(tensor));
  kernel.body = [cpu = as_cpu(tensor), value] { cpu.fill_(value); };
  kernel.gate = gate;
  launch(current_stream(tensor.device()), std::move(kernel));
}

Hold::Hold(const c10::Stream& stream) : gate_(gpu().make_gate()) {
  launch(stream, {"hold", {}, {}, nullptr, gate_});
}

Hold::Hold(c10::Device device) : gate_(gpu().make_gate()) {
  const OnDevice on(device.index());
  check(gpu().launch(kProcess, nullptr, {"hold", {}, {}, nullptr, gate_}));
  for (const bool high : {false, true}) {
    for (const cuda::Stream stream : pool_of(device, high))
      check(gpu().launch(kProcess, stream, {"hold", {}, {}, nullptr, gate_}));
  }
}

Hold::~Hold() { release(); }
void Hold::release() { gpu().open_gate(gate_); }

c10::Stream current_stream(c10::Device device) {
  const c10::Device exact = indexed(device);
  return make_stream(exact, current_streams.at(static_cast<std::size_t>(exact.index())));
}
c10::Stream default_stream(c10::Device device) { return make_stream(indexed(device), 0); }
c10::Stream pool_stream(c10::Device device) {
  return c10::impl::getDeviceGuardImpl(c10::kCUDA)->getStreamFromGlobalPool(device, false);
}

bool has_queued_work(c10::Device device) { return gpu().has_held_work(kProcess, device.index()); }

std::vector<c10::Stream> recorded_streams(const at::Tensor& tensor) {
  Memory& memory = Memory::get();
  const std::lock_guard lock(memory.mutex);
  return memory.blocks.at(device_on_cpu::base(tensor)).recorded;
}

void break_device(int index) { gpu().break_context(kProcess, index, cuda::kIllegalAddress); }
void heal() { gpu().heal(); }

void fail_allocations(int count) {
  Memory& memory = Memory::get();
  const std::lock_guard lock(memory.mutex);
  memory.failing = count;
}

std::string take_violations() {
  release_freed(Memory::get());
  return gpu().take_violations();
}

}  // namespace stitch::testing::double_device
