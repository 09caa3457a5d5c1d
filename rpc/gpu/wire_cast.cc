#include "stitch/rpc/gpu/wire_cast.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "stitch/rpc/gpu/host_copy.h"

namespace stitch::rpc {

namespace {

at::Tensor narrowed_dense(const at::Tensor& tensor, at::ScalarType type) {
  const at::Tensor cast = each_element_once(tensor).to(type);
  return cast.sizes() == tensor.sizes() ? cast : cast.expand(tensor.sizes());
}

at::Tensor widened_dense(const at::Tensor& tensor) {
  // Not a view in the eyes of autograd: the receiver may change it in place.
  const at::AutoDispatchBelowADInplaceOrView plain;
  if (tensor.numel() == 0 || tensor.is_contiguous()) return tensor.to(at::kFloat);
  return spanned_elements(tensor).to(at::kFloat).as_strided(tensor.sizes(), tensor.strides(), 0);
}

}  // namespace

bool is_cast(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.numel() > 0 &&
         (tensor.layout() == at::kStrided || tensor.layout() == at::kSparse);
}

at::Tensor narrowed(const at::Tensor& tensor, at::ScalarType type) {
  const at::Tensor plain = tensor.detach();
  at::Tensor cast = plain.is_sparse()
                        ? make_coo(plain._indices(), narrowed_dense(plain._values(), type), plain)
                        : narrowed_dense(plain, type);
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
