#pragma once

#include <ATen/core/Tensor.h>

#include "stitch/rpc/calls.h"

namespace stitch_bench {

// The remote functions of the benchmark. Those named ..._inline are marked STITCH_INLINE.
void empty();
void empty_inline();
at::Tensor add(at::Tensor a, at::Tensor b);
at::Tensor add_inline(at::Tensor a, at::Tensor b);
at::Tensor echo(at::Tensor tensor);
void take(at::Tensor tensor);

}  // namespace stitch_bench
