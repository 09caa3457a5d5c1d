#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace stitch::rpc {

// Tensors that travel as a narrower type where a device map says so ("cuda:1/bf16"): float32 ones,
// dense or sparse (its values), with any elements. They are rounded to the nearest, ties to even,
// before anything else is done to them, so that what arrives depends on no path; the receiver makes
// float32 tensors of them again.
[[nodiscard]] bool is_cast(const at::Tensor& tensor);
// As it travels; expanded dimensions stay expanded. What it has to compute is queued on the
// device's current stream. REQUIRES: grad mode is off.
[[nodiscard]] at::Tensor narrowed(const at::Tensor& tensor, at::ScalarType type);
// float32 again, with the same strides and requires_grad; on the current stream. It takes twice the
// memory that has arrived, whatever the strides are. REQUIRES: as above.
[[nodiscard]] at::Tensor widened(const at::Tensor& tensor);
// Whether a tensor may have travelled so.
[[nodiscard]] bool may_be_widened(const at::Tensor& tensor);

}  // namespace stitch::rpc
