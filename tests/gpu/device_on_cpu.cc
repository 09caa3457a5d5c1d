#include "tests/gpu/device_on_cpu.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/SparseTensorUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstring>
#include <exception>
#include <optional>
#include <utility>

// Signatures of virtual functions differ between versions of libtorch: both are there.
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wunknown-warning-option"
#pragma GCC diagnostic ignored "-Winconsistent-missing-override"
#pragma GCC diagnostic ignored "-Woverloaded-virtual"

namespace stitch::testing::device_on_cpu {

namespace {

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) const { return double_device::allocate(bytes); }
  c10::DataPtr allocate(std::size_t bytes) { return double_device::allocate(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &double_device::free_memory; }
  void copy_data(void* to, const void* from, std::size_t bytes) const {
    std::memcpy(to, from, bytes);
  }
};

using double_device::compute;
using double_device::copy_tensor;
using double_device::current_device;
using double_device::free_memory;
using double_device::make_current;

const c10::DispatchKeySet kCudaKeys(c10::DispatchKey::CUDA);

at::Tensor over(c10::Storage storage, c10::DispatchKeySet keys, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.is_conj()) made.unsafeGetTensorImpl()->_set_conj(true);
  if (like.is_neg()) made.unsafeGetTensorImpl()->_set_neg(true);
  return made;
}

// ---- operators

int index_or_current(const c10::optional<at::Device>& device) {
  return device ? indexed(*device).index() : current_device();
}

at::Tensor empty_memory_format(at::IntArrayRef sizes, c10::optional<at::ScalarType> dtype,
                               c10::optional<at::Layout>, c10::optional<at::Device> device,
                               c10::optional<bool>, c10::optional<at::MemoryFormat> format) {
  const OnDevice on(index_or_current(device));
  return at::detail::empty_generic(sizes, allocator(), kCudaKeys, dtype ? *dtype : at::kFloat,
                                   format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         c10::optional<at::ScalarType> dtype, c10::optional<at::Layout>,
                         c10::optional<at::Device> device, c10::optional<bool>) {
  const OnDevice on(index_or_current(device));
  return at::detail::empty_strided_generic(sizes, strides, allocator(), kCudaKeys,
                                           dtype ? *dtype : at::kFloat);
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  copy_tensor(to, from, non_blocking);
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
at::Tensor indices_once(const at::Tensor& tensor) {
  TORCH_CHECK(is_coalesced(tensor), "indices() of an uncoalesced tensor");
  return sparse_indices(tensor);
}
at::Tensor values_once(const at::Tensor& tensor) {
  TORCH_CHECK(is_coalesced(tensor), "values() of an uncoalesced tensor");
  const at::Tensor values = sparse_values(tensor);
  // Another tensor of the same memory: autograd makes it a view.
  return at::Tensor(values.getIntrusivePtr()->shallow_copy_and_detach(
      values.unsafeGetTensorImpl()->version_counter(), true));
}
at::Tensor& set_coalesced(at::Tensor& tensor, bool coalesced) {
  at::sparse::get_sparse_impl(tensor)->set_coalesced(coalesced);
  return tensor;
}

bool is_written(const c10::OperatorHandle& op, std::size_t argument) {
  const auto* const alias = op.schema().arguments()[argument].alias_info();
  return alias != nullptr && alias->isWrite();
}

// One call of an operator with its tensors on devices taken for tensors on the CPU.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack) : op_(op), stack_(stack) {}

  void wrap_arguments() {
    const std::size_t first = stack_.size() - op_.schema().arguments().size();
    for (std::size_t i = first; i < stack_.size(); ++i) {
      c10::IValue& value = stack_[i];
      const bool written = is_written(op_, i - first);
      if (value.isTensor()) {
        value = wrap(value.toTensor(), written);
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& each : value.toTensorVector()) list.push_back(wrap(each, written));
        value = list;
      } else if (value.isOptionalTensorList()) {
        c10::List<c10::optional<at::Tensor>> list;
        for (const auto& each : value.toOptionalTensorVector())
          list.push_back(each ? c10::optional<at::Tensor>(wrap(*each, written)) : c10::nullopt);
        value = list;
      } else if (value.isDevice() && value.toDevice().is_cuda()) {
        device_ = indexed(value.toDevice());
        value = c10::Device(c10::kCPU);
      }
    }
  }

  void run() {
    const c10::Device where = device_.value_or(indexed(c10::Device(c10::kCUDA)));
    std::exception_ptr thrown;
    bool ran = false;
    compute(op_.schema().name(), where, read_, written_, [&] {
      const at::AutoDispatchBelowADInplaceOrView plain;
      ran = true;
      try {
        op_.callBoxed(&stack_);
      } catch (...) {
        thrown = std::current_exception();
      }
    });
    TORCH_CHECK(ran, "CUDA error: the device has failed");
    if (thrown) std::rethrow_exception(thrown);
    const OnDevice on(where.index());
    unwrap_changed();
    unwrap_results();
  }

 private:
  at::Tensor wrap(const at::Tensor& tensor, bool written) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    if (!tensor.is_sparse()) return wrap_dense(tensor, written);
    const auto* const impl = at::sparse::get_sparse_impl(tensor);
    const at::Tensor indices = wrap_dense(impl->indices(), written);
    const at::Tensor values = wrap_dense(impl->values(), written);
    wrapped_.emplace_back(tensor, sparse_of(tensor, c10::DispatchKey::SparseCPU, indices, values));
    return wrapped_.back().second;
  }

  at::Tensor wrap_dense(const at::Tensor& tensor, bool written) {
    if (!device_) device_ = tensor.device();
    read_.push_back(tensor);
    if (written) written_.push_back(tensor);
    // An output without memory yet is given some by the operator.
    const bool grows = written && tensor.numel() == 0 && base(tensor) == nullptr;
    wrapped_.emplace_back(tensor, grows ? at::empty({0}, tensor.scalar_type()) : as_cpu(tensor));
    return wrapped_.back().second;
  }

  at::Tensor unwrap(const at::Tensor& result) {
    if (!result.defined() || !result.is_cpu()) return result;
    for (const auto& [original, alias] : wrapped_) {
      if (result.is_same(alias)) return original;
    }
    if (!result.is_sparse()) return unwrap_dense(result);
    const auto* const impl = at::sparse::get_sparse_impl(result);
    return sparse_of(result, c10::DispatchKey::SparseCUDA, unwrap_dense(impl->indices()),
                     unwrap_dense(impl->values()));
  }

  at::Tensor unwrap_dense(const at::Tensor& result) {
    for (const auto& [original, alias] : wrapped_) {
      if (!original.is_sparse() && base(result) == base(original) && base(result) != nullptr)
        return over(c10::Storage(original.storage()), kCudaKeys, result);
    }
    at::Tensor made = at::detail::empty_strided_generic(
        result.sizes(), result.strides(), allocator(), kCudaKeys, result.scalar_type());
    if (made.numel() > 0) copy_tensor(made, result, true);
    return made;
  }

  // Sparse tensors may have got other parts in place, and empty ones memory.
  void unwrap_changed() {
    for (const auto& [original, alias] : wrapped_) {
      if (!original.is_sparse()) {
        if (base(original) != nullptr || alias.numel() == 0) continue;
        const at::Tensor made = unwrap_dense(alias);
        auto* const impl = original.unsafeGetTensorImpl();
        impl->set_storage_keep_dtype(made.storage());
        impl->set_sizes_and_strides(made.sizes(), made.strides());
        continue;
      }
      auto* const impl = at::sparse::get_sparse_impl(original);
      const auto* const changed = at::sparse::get_sparse_impl(alias);
      if (base(changed->values()) != base(impl->values()))
        impl->set_indices_and_values_unsafe(unwrap_dense(changed->indices()),
                                            unwrap_dense(changed->values()));
      impl->set_coalesced(changed->coalesced());
    }
  }

  void unwrap_results() {
    for (std::size_t i = stack_.size() - op_.schema().returns().size(); i < stack_.size(); ++i) {
      c10::IValue& value = stack_[i];
      if (value.isTensor()) {
        value = unwrap(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& each : value.toTensorVector()) list.push_back(unwrap(each));
        value = list;
      }
    }
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  std::optional<c10::Device> device_;
  std::vector<at::Tensor> read_, written_;
  std::vector<std::pair<at::Tensor, at::Tensor>> wrapped_;  // on the device, on the CPU
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op, *stack);
  call.wrap_arguments();
  call.run();
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
  // Of libtorch 2.x, these have a kernel for all kinds of tensors, too, which refuses this one.
  m.impl("indices", TORCH_FN(indices_once));
  m.impl("values", TORCH_FN(values_once));
  // Others have one which knows dense ones only.
  m.impl("clone", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty_memory_format));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("copy_", TORCH_FN(copy_));
}

}  // namespace

c10::Allocator* allocator() {
  static auto* const made = new Allocator;
  return made;
}

c10::Stream make_stream(c10::Device device, std::int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, device, id);
}

c10::Device indexed(c10::Device device) {
  return {c10::kCUDA,
          device.has_index() ? device.index() : static_cast<c10::DeviceIndex>(current_device())};
}

at::Tensor as_cpu(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  return over(
      c10::Storage(c10::Storage::use_byte_size_t(), static_cast<std::int64_t>(storage.nbytes()),
                   c10::DataPtr(const_cast<void*>(storage.data_ptr().get()), c10::kCPU),
                   c10::GetAllocator(c10::kCPU), false),
      c10::DispatchKeySet(c10::DispatchKey::CPU), tensor);
}

void copy_on_cpu(const at::Tensor& to, const at::Tensor& from) {
  const at::AutoDispatchBelowADInplaceOrView plain;
  at::Tensor(to).copy_(from.expand(to.sizes()));
}

OnDevice::OnDevice(int device) : outer_(current_device()) { make_current(device); }
OnDevice::~OnDevice() {
  try {
    make_current(outer_);
  } catch (...) {
    // The device has failed.
  }
}

}  // namespace stitch::testing::device_on_cpu
