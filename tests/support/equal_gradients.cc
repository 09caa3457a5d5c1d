#include "tests/support/equal_gradients.h"

#include <algorithm>
#include <cmath>

namespace stitch::testing {

::testing::AssertionResult equal_gradients(const at::Tensor& got, const at::Tensor& expected,
                                           double tolerance) {
  if (!got.defined() && !expected.defined()) return ::testing::AssertionSuccess();
  const at::Tensor shape = expected.defined() ? expected : got;
  const auto dense = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return at::zeros(shape.sizes(), shape.options().layout(c10::kStrided));
    const at::Tensor values = (tensor.is_sparse() ? tensor.to_dense() : tensor).detach();
    return values.scalar_type() == at::kHalf ? values.to(at::kFloat) : values;  // 1.13 has few ops
  };
  const at::Tensor a = dense(got), b = dense(expected);
  if (a.sizes() != b.sizes())
    return ::testing::AssertionFailure() << "shape " << a.sizes() << ", expected " << b.sizes();
  if (a.numel() == 0) return ::testing::AssertionSuccess();
  const double scale = std::max(1.0, at::abs(b).max().item<double>());
  const double difference = at::abs(a - b).max().item<double>();
  if (std::isfinite(scale) && difference <= tolerance * scale) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "differs by " << difference << " at scale " << scale
                                       << (got.defined() ? "" : " (no gradient at all)");
}

}  // namespace stitch::testing
