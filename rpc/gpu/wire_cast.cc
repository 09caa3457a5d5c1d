#include "stitch/rpc/gpu/wire_cast.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "stitch/rpc/gpu/host_copy.h"

namespace stitch::rpc {

namespace {

at::Tensor narrowed_dense(const at::Tensor& tensor, at::ScalarType type) {
  at::Tensor once = tensor.detach();
  if (once._is_zerotensor()) once = at::zeros(once.sizes(), once.options());
  for (std::int64_t d = 0; d < once.dim(); ++d) {
    if (once.stride(d) == 0 && once.size(d) > 1) once = once.narrow(d, 0, 1);
  }
  const at::Tensor cast = once.resolve_neg().to(type);
  return cast.sizes() == tensor.sizes() ? cast : cast.expand(tensor.sizes());
}

// What lies between the first and the last element is cast as it is: dimensions may be expanded, or
// overlap as no correct sender has them.
at::Tensor widened_dense(const at::Tensor& tensor) {
  // Not a view in the eyes of autograd: the receiver may change it in place.
  const at::AutoDispatchBelowADInplaceOrView plain;
  if (tensor.numel() == 0 || tensor.is_contiguous()) return tensor.to(at::kFloat);
  std::int64_t elements = 1;
  for (std::int64_t d = 0; d < tensor.dim(); ++d)
    elements += (tensor.size(d) - 1) * tensor.stride(d);
  return tensor.as_strided({elements}, {1}, tensor.storage_offset())
      .to(at::kFloat)
      .as_strided(tensor.sizes(), tensor.strides(), 0);
}

}  // namespace

bool is_cast(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.numel() > 0 &&
         (tensor.layout() == at::kStrided || tensor.layout() == at::kSparse);
}

at::Tensor narrowed(const at::Tensor& tensor, at::ScalarType type) {
  if (!tensor.is_sparse()) {
    at::Tensor cast = narrowed_dense(tensor, type);
    return tensor.requires_grad() ? cast.set_requires_grad(true) : cast;
  }
  const at::Tensor plain = tensor.detach();
  at::Tensor cast = make_coo(plain._indices(), narrowed_dense(plain._values(), type), plain);
  return tensor.requires_grad() ? cast.set_requires_grad(true) : cast;
}

at::Tensor widened(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.detach();
  at::Tensor wide = plain.is_sparse()
                        ? make_coo(plain._indices(), widened_dense(plain._values()), plain)
                        : widened_dense(plain);
  return tensor.requires_grad() ? wide.set_requires_grad(true) : wide;
}

bool may_be_widened(const at::Tensor& tensor) {
  return (tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf) &&
         (tensor.layout() == at::kStrided || tensor.layout() == at::kSparse);
}

}  // namespace stitch::rpc
