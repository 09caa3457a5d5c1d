#include "stitch/rpc/gpu/host_copy.h"

#include <ATen/ATen.h>

namespace stitch::rpc {

namespace {

bool pinned_memory_works() {
  static const bool works = [] {
    try {
      static_cast<void>(at::empty({1}, at::TensorOptions().pinned_memory(true)));
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }();
  return works;
}

}  // namespace

at::Tensor each_element_once(const at::Tensor& tensor) {
  at::Tensor once = tensor.detach();
  if (once._is_zerotensor()) once = at::zeros(once.sizes(), once.options());
  once = once.resolve_conj().resolve_neg();
  for (std::int64_t d = 0; d < once.dim(); ++d) {
    if (once.stride(d) == 0 && once.size(d) > 1) once = once.narrow(d, 0, 1);
  }
  return once;
}

at::Tensor spanned_elements(const at::Tensor& tensor) {
  std::int64_t elements = 1;
  for (std::int64_t d = 0; d < tensor.dim(); ++d)
    elements += (tensor.size(d) - 1) * tensor.stride(d);
  return tensor.as_strided({elements}, {1}, tensor.storage_offset());
}

PreparedCopy prepare_copy(const at::Tensor& original) {
  at::Tensor dense = each_element_once(original);
  if (dense.numel() > 0 && !dense.is_non_overlapping_and_dense())
    dense = dense.clone(at::MemoryFormat::Preserve);
  return {dense, original.sizes().vec()};
}

at::Tensor copy_to_host(const PreparedCopy& source) {
  at::Tensor host = at::empty_strided(
      source.dense.sizes(), source.dense.strides(),
      at::TensorOptions().dtype(source.dense.scalar_type()).pinned_memory(pinned_memory_works()));
  if (host.numel() > 0) host.copy_(source.dense, true);
  return host.sizes() == at::IntArrayRef(source.sizes) ? host : host.expand(source.sizes);
}

at::Tensor pinned(const at::Tensor& host) {
  if (!pinned_memory_works()) return host;
  return at::empty(host.sizes(), host.options().pinned_memory(true)).copy_(host);
}

at::Tensor over_storage(const c10::Storage& storage, at::ScalarType dtype, at::IntArrayRef sizes,
                        at::IntArrayRef strides, std::uint64_t offset) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      c10::scalarTypeToTypeMeta(dtype));
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(static_cast<std::int64_t>(offset / c10::elementSize(dtype)));
  impl->set_sizes_and_strides(sizes, strides);
  return tensor;
}

at::Tensor make_coo(const at::Tensor& indices, const at::Tensor& values, const at::Tensor& like) {
  return at::_sparse_coo_tensor_unsafe(indices, values, like.sizes(),
                                       values.options().layout(at::kSparse))
      ._coalesced_(like.is_coalesced());
}

}  // namespace stitch::rpc
