#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace stitch::rpc {

// The values of a tensor, detached, with its expanded dimensions once. REQUIRES: as below.
[[nodiscard]] at::Tensor each_element_once(const at::Tensor& tensor);
// What lies between the first and the last element of a tensor that is not empty, as it is: its
// dimensions may be expanded, or overlap as no correct sender has them.
[[nodiscard]] at::Tensor spanned_elements(const at::Tensor& tensor);

// A tensor on a device made ready for one copy to the host: dense, with its expanded dimensions
// once. A value.
struct PreparedCopy {
  at::Tensor dense;
  std::vector<std::int64_t> sizes;  // of the tensor

  [[nodiscard]] std::size_t bytes() const {
    return static_cast<std::size_t>(dense.numel()) * dense.element_size();
  }
};
// What it has to compute is queued on the device's current stream. REQUIRES: grad mode is off; the
// tensor is dense, as all below.
[[nodiscard]] PreparedCopy prepare_copy(const at::Tensor& tensor);
// The tensor on the CPU, in pinned memory where libtorch has that. The copy is queued on the
// device's current stream.
[[nodiscard]] at::Tensor copy_to_host(const PreparedCopy& source);
// A copy of a contiguous tensor on the CPU in pinned memory; itself where libtorch has none.
[[nodiscard]] at::Tensor pinned(const at::Tensor& host);
// A tensor over memory of a CUDA device, in the eyes of autograd no view of anything. Nothing is
// checked; `offset` is in bytes, a multiple of the element size.
[[nodiscard]] at::Tensor over_storage(const c10::Storage& storage, at::ScalarType dtype,
                                      at::IntArrayRef sizes, at::IntArrayRef strides,
                                      std::uint64_t offset);
// A sparse COO tensor of these parts, with the sizes and flags of `like`. Nothing is checked.
[[nodiscard]] at::Tensor make_coo(const at::Tensor& indices, const at::Tensor& values,
                                  const at::Tensor& like);

}  // namespace stitch::rpc
