// One file, though long: a device is one thing, and its parts use each other's tables.
#include "tests/gpu/double_torch_device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/SparseTensorUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

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
#include "tests/gpu/double_kernels.h"

// Signatures of virtual functions differ between versions of libtorch: both are there.
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wunknown-warning-option"
#pragma GCC diagnostic ignored "-Winconsistent-missing-override"
#pragma GCC diagnostic ignored "-Woverloaded-virtual"

namespace stitch::testing::double_device {

namespace {

namespace cuda = transport::gpu::cuda;
using transport::gpu::CudaApi;
using transport::gpu::GpuLibraries;
using transport::gpu::test::FakeGpu;
using Kernel = FakeGpu::Kernel;

constexpr int kPoolStreams = 4;  // of each priority
constexpr int kProcess = 0;

const CudaApi& api() { return gpu().cuda(kProcess); }

void check(cuda::Status status) {
  TORCH_CHECK(status == cuda::kSuccess, "CUDA error: ", api().get_error_string(status));
}

// ---- streams: the id of a stream is its handle, 0 for the default one

c10::Stream make_stream(c10::Device device, std::int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, device, id);
}
cuda::Stream handle(const c10::Stream& stream) {
  return reinterpret_cast<cuda::Stream>(static_cast<std::uintptr_t>(stream.id()));
}
int current_device() {
  int device = 0;
  check(api().get_device(&device));
  return device;
}
class OnDevice {
 public:
  explicit OnDevice(int device) : outer_(current_device()) { check(api().set_device(device)); }
  ~OnDevice() { static_cast<void>(api().set_device(outer_)); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const int outer_;
};
c10::Device indexed(c10::Device device) {
  return {c10::kCUDA,
          device.has_index() ? device.index() : static_cast<c10::DeviceIndex>(current_device())};
}
thread_local std::array<std::int64_t, kDevices> current_streams{};
c10::Stream current_stream(c10::Device device) {
  const c10::Device exact = indexed(device);
  return make_stream(exact, current_streams.at(static_cast<std::size_t>(exact.index())));
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
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    static_cast<void>(api().set_device(device.index()));
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return current_stream(device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return make_stream(indexed(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    static std::mutex mutex;
    static std::map<std::pair<int, bool>, std::pair<std::vector<cuda::Stream>, int>> pools;
    const std::lock_guard lock(mutex);
    const c10::Device exact = indexed(device);
    auto& [streams, next] = pools[{exact.index(), high}];
    if (streams.empty()) {
      const OnDevice on(exact.index());
      streams.resize(kPoolStreams);
      for (auto& stream : streams)
        check(api().stream_create_with_priority(&stream, cuda::kStreamNonBlocking, high ? -1 : 0));
    }
    const cuda::Stream chosen = streams[static_cast<std::size_t>(next++ % kPoolStreams)];
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
    check(api().stream_wait_event(handle(stream), static_cast<cuda::Event>(event), 0));
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const cuda::Status status = api().event_query(static_cast<cuda::Event>(event));
    if (status != cuda::kNotReady) check(status);
    return status == cuda::kSuccess;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
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

// Gives back what no stream uses any more. Without the lock: memory of others is not touched.
void release_freed(Memory& memory) {
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

void free_block(void* data) {
  if (data == nullptr) return;
  Memory& memory = Memory::get();
  std::optional<Block> block;
  {
    const std::lock_guard lock(memory.mutex);
    const auto node = memory.blocks.extract(data);
    block.emplace(node.mapped());
  }
  Freed freed{data, block->stream.device_index(), {}};
  // A borrowed stream has ended what it had to do here: the host has seen it.
  if (!block->borrowed) freed.until.push_back(record(block->stream));
  for (const auto& stream : block->recorded) freed.until.push_back(record(stream));
  {
    const std::lock_guard lock(memory.mutex);
    memory.freed.push_back(std::move(freed));
  }
  release_freed(memory);
}

struct Allocator final : c10::Allocator {
  static c10::DataPtr take(std::size_t bytes) {
    Memory& memory = Memory::get();
    const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(current_device()));
    if (bytes == 0) return {nullptr, device};
    release_freed(memory);
    {
      const std::lock_guard lock(memory.mutex);
      if (memory.failing > 0) {
        --memory.failing;
        TORCH_CHECK(false, "CUDA out of memory. Tried to allocate ", bytes, " bytes");
      }
    }
    void* data = nullptr;
    const cuda::Status status = api().malloc(&data, bytes);
    TORCH_CHECK(status == cuda::kSuccess, "CUDA out of memory. Tried to allocate ", bytes);
    const std::lock_guard lock(memory.mutex);
    const c10::Stream stream = current_stream(device);
    memory.blocks.insert_or_assign(
        data, Block{stream, memory.borrowed_streams.contains(stream.id()), {}});
    return {data, data, &free_block, device};
  }
  c10::DataPtr allocate(std::size_t bytes) const { return take(bytes); }
  c10::DataPtr allocate(std::size_t bytes) { return take(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const {
    std::memcpy(to, from, bytes);
  }
};
Allocator* allocator() {
  static auto* const made = new Allocator;
  return made;
}

const c10::DispatchKeySet kCudaKeys(c10::DispatchKey::CUDA);
// The same memory, as a tensor on the CPU that owns nothing.
at::Tensor as_cpu(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::Storage plain(c10::Storage::use_byte_size_t(), static_cast<std::int64_t>(storage.nbytes()),
                     c10::DataPtr(const_cast<void*>(storage.data_ptr().get()), c10::kCPU),
                     c10::GetAllocator(c10::kCPU), false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(plain), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return made;
}
const void* base(const at::Tensor& tensor) { return tensor.storage().data_ptr().get(); }
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

at::Tensor empty_memory_format(at::IntArrayRef sizes, c10::optional<at::ScalarType> dtype,
                               c10::optional<at::Layout>, c10::optional<at::Device> device,
                               c10::optional<bool>, c10::optional<at::MemoryFormat> format) {
  const OnDevice on(device ? indexed(*device).index() : current_device());
  return at::detail::empty_generic(sizes, allocator(), kCudaKeys, dtype ? *dtype : at::kFloat,
                                   format);
}
at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         c10::optional<at::ScalarType> dtype, c10::optional<at::Layout>,
                         c10::optional<at::Device> device, c10::optional<bool>) {
  const OnDevice on(device ? indexed(*device).index() : current_device());
  return at::detail::empty_strided_generic(sizes, strides, allocator(), kCudaKeys,
                                           dtype ? *dtype : at::kFloat);
}

// Queued on the current stream of the device (of the destination, between two).
at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const c10::Stream stream = current_stream(to.is_cuda() ? to.device() : from.device());
  Kernel kernel;
  kernel.name = "copy_";
  if (from.is_cuda()) kernel.reads.push_back(span_of(from));
  if (to.is_cuda()) kernel.writes.push_back(span_of(to));
  kernel.body = [to_cpu = to.is_cuda() ? as_cpu(to) : to,
                 from_cpu = from.is_cuda() ? as_cpu(from) : from] {
    const at::AutoDispatchBelowADInplaceOrView plain;
    to_cpu.copy_(from_cpu.expand(to_cpu.sizes()));
  };
  launch(stream, std::move(kernel));
  if (!non_blocking) {
    const OnDevice on(stream.device_index());
    check(api().stream_synchronize(handle(stream)));
  }
  return to;
}

// A sparse tensor of these parts with the shape and flag of `like`. (Without operators, which would
// come back here.)
at::Tensor sparse_of(const at::Tensor& like, c10::DispatchKey key, const at::Tensor& indices,
                     const at::Tensor& values) {
  auto made =
      at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(key), values.dtype());
  auto* const impl = at::sparse::get_sparse_impl(made);
  impl->resize_(like.sparse_dim(), like.dense_dim(), like.sizes());
  impl->set_indices_and_values_unsafe(indices, values);
  impl->set_coalesced(at::sparse::get_sparse_impl(like)->coalesced());
  return made;
}
at::Tensor sparse_indices(const at::Tensor& tensor) {
  return at::sparse::get_sparse_impl(tensor)->indices();
}
at::Tensor sparse_values(const at::Tensor& tensor) {
  return at::sparse::get_sparse_impl(tensor)->values();
}
std::int64_t sparse_dim(const at::Tensor& tensor) {
  return at::sparse::get_sparse_impl(tensor)->sparse_dim();
}
std::int64_t dense_dim(const at::Tensor& tensor) {
  return at::sparse::get_sparse_impl(tensor)->dense_dim();
}
bool is_coalesced(const at::Tensor& tensor) {
  return at::sparse::get_sparse_impl(tensor)->coalesced();
}
at::Tensor& set_coalesced(at::Tensor& tensor, bool coalesced) {
  at::sparse::get_sparse_impl(tensor)->set_coalesced(coalesced);
  return tensor;
}

bool is_written(const c10::OperatorHandle& op, std::size_t argument) {
  const auto* const alias = op.schema().arguments()[argument].alias_info();
  return alias != nullptr && alias->isWrite();
}

// Everything else: on the CPU, in a kernel that is waited for.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::size_t arguments = op.schema().arguments().size();
  const std::size_t first = stack->size() - arguments;
  std::vector<std::pair<at::Tensor, at::Tensor>> wrapped;  // on the device, on the CPU
  std::optional<c10::Device> device;
  Kernel kernel;
  kernel.name = op.schema().name();
  bool written = false;
  const auto wrap_dense = [&](const at::Tensor& tensor) {
    if (!device) device = tensor.device();
    kernel.reads.push_back(span_of(tensor));
    if (written) kernel.writes.push_back(span_of(tensor));
    wrapped.emplace_back(tensor, as_cpu(tensor));
    return wrapped.back().second;
  };
  const auto wrap = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    if (!tensor.is_sparse()) return wrap_dense(tensor);
    const auto* const impl = at::sparse::get_sparse_impl(tensor);
    wrapped.emplace_back(tensor,
                         sparse_of(tensor, c10::DispatchKey::SparseCPU, wrap_dense(impl->indices()),
                                   wrap_dense(impl->values())));
    return wrapped.back().second;
  };
  for (std::size_t i = first; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    written = is_written(op, i - first);
    if (value.isTensor()) {
      value = wrap(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) list.push_back(wrap(each));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<c10::optional<at::Tensor>> list;
      for (const auto& each : value.toOptionalTensorVector())
        list.push_back(each ? c10::optional<at::Tensor>(wrap(*each)) : c10::nullopt);
      value = list;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      device = indexed(value.toDevice());
      value = c10::Device(c10::kCPU);
    }
  }
  const c10::Device where = device.value_or(indexed(c10::Device(c10::kCUDA)));
  const c10::Stream stream = current_stream(where);
  std::exception_ptr thrown;
  bool ran = false;
  kernel.body = [&] {
    const at::AutoDispatchBelowADInplaceOrView plain;
    ran = true;
    try {
      op.callBoxed(stack);
    } catch (...) {
      thrown = std::current_exception();
    }
  };
  launch(stream, std::move(kernel));
  {
    const OnDevice on(where.index());
    check(api().stream_synchronize(handle(stream)));
  }
  TORCH_CHECK(ran, "CUDA error: the device has failed");
  if (thrown) std::rethrow_exception(thrown);
  const OnDevice on(where.index());
  const auto unwrap_dense = [&](const at::Tensor& result) {
    for (const auto& [original, alias] : wrapped) {
      if (original.is_sparse() || base(result) != base(original) || base(result) == nullptr)
        continue;
      auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(original.storage()),
                                                           kCudaKeys, result.dtype());
      view.unsafeGetTensorImpl()->set_storage_offset(result.storage_offset());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
      return view;
    }
    at::Tensor made = at::detail::empty_strided_generic(
        result.sizes(), result.strides(), allocator(), kCudaKeys, result.scalar_type());
    if (made.numel() > 0) copy(made, result, true);
    return made;
  };
  for (const auto& [original, alias] : wrapped) {
    if (!original.is_sparse()) continue;
    auto* const impl = at::sparse::get_sparse_impl(original);  // it may have been changed in place
    const auto* const changed = at::sparse::get_sparse_impl(alias);
    if (base(changed->values()) != base(impl->values()))
      impl->set_indices_and_values_unsafe(unwrap_dense(changed->indices()),
                                          unwrap_dense(changed->values()));
    impl->set_coalesced(changed->coalesced());
  }
  const auto unwrap = [&](const at::Tensor& result) {
    if (!result.defined() || !result.is_cpu()) return result;
    for (const auto& [original, alias] : wrapped) {
      if (result.is_same(alias)) return original;
    }
    if (!result.is_sparse()) return unwrap_dense(result);
    const auto* const impl = at::sparse::get_sparse_impl(result);
    return sparse_of(result, c10::DispatchKey::SparseCUDA, unwrap_dense(impl->indices()),
                     unwrap_dense(impl->values()));
  };
  for (std::size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = unwrap(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) list.push_back(unwrap(each));
      value = list;
    }
  }
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}
TORCH_LIBRARY_IMPL(_, SparseCUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}
TORCH_LIBRARY_IMPL(aten, SparseCUDA, m) {
  m.impl("_indices", TORCH_FN(sparse_indices));
  m.impl("_values", TORCH_FN(sparse_values));
  m.impl("sparse_dim", TORCH_FN(sparse_dim));
  m.impl("dense_dim", TORCH_FN(dense_dim));
  m.impl("is_coalesced", TORCH_FN(is_coalesced));
  m.impl("_coalesced_", TORCH_FN(set_coalesced));
  // Others have a kernel for all kinds of tensors, which knows dense ones only.
  m.impl("clone", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty_memory_format));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("copy_", TORCH_FN(copy));
}

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
transport::gpu::ProcessIdentity identity(std::uint32_t worker) {
  auto same = transport::gpu::this_process();
  if (apart) same.process += worker;
  return same;
}

const rpc::DeviceBridge kBridge{&from_raw, &raw, &identity, &kernels()};

}  // namespace

FakeGpu& gpu() {
  static auto* const made = [] {
    FakeGpu::Options options;
    options.driving = FakeGpu::Driving::thread;
    options.devices = kDevices;
    options.network_transport = true;
    // Tests hold one stream and let the host wait for another, which must not lie behind it.
    options.hardware_queues = 0;
    const char* const seed = std::getenv("DOUBLE_SEED");
    if (seed != nullptr) options.seed = std::strtoull(seed, nullptr, 10);
    return new FakeGpu(options);
  }();
  return *made;
}

bool install() {
  static const Guard guard;
  static const c10::impl::DeviceGuardImplRegistrar registrar(c10::kCUDA, &guard);
  c10::SetAllocator(c10::kCUDA, allocator());
  static const GpuLibraries libraries(&api(), &gpu().nccl(kProcess), "");
  static const GpuLibraries::Override override(libraries);
  return rpc::set_device_bridge(&kBridge);
}

void workers_are_processes(bool are) { apart = are; }

void fill_later(const at::Tensor& tensor, float value, int gate) {
  Kernel kernel;
  kernel.name = "fill_later";
  kernel.writes.push_back(span_of(tensor));
  kernel.body = [cpu = as_cpu(tensor), value] { cpu.fill_(value); };
  kernel.gate = gate;
  launch(current_stream(tensor.device()), std::move(kernel));
}

void hold(const c10::Stream& stream, int gate) {
  Kernel kernel;
  kernel.name = "hold";
  kernel.gate = gate;
  launch(stream, std::move(kernel));
}

c10::Stream pool_stream(c10::Device device) {
  return c10::impl::getDeviceGuardImpl(c10::kCUDA)->getStreamFromGlobalPool(device, false);
}

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
