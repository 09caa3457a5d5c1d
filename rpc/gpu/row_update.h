#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "stitch/transport/gpu/kernels/kernel_abi.h"

namespace stitch::rpc {

// What an optimizer does to the rows of a parameter (its first dimension) that a sparse gradient
// names: transport::gpu::SparseRule has the formulas. A value.
struct RowUpdate {
  using Rule = transport::gpu::SparseRule;
  Rule rule = Rule::sgd;
  double learning_rate = 0;
  double lr_decay = 0;    // adagrad, rowwise_adagrad
  double eps = 0;         // all but sgd
  double beta1 = 0;       // adam
  double beta2 = 0;       // adam
  std::int64_t step = 1;  // 1 for the first
  // Changed in place. Of the parameter's shape; of rowwise_adagrad, one number for each row.
  at::Tensor first_state{};
  at::Tensor second_state{};  // adam
};

// Queues the update of `parameter`, on the current stream of its device, as one call of our own
// kernel. For fp32 tensors on one CUDA device, contiguous but for the gradient's; the gradient has
// one sparse dimension and may name a row any number of times. The parameter's version counts up.
// False, with nothing changed, where that is not so or where there are no kernels. Throws
// Error(internal) naming the device when it has failed. Thread contract: any thread, one at a time
// for a parameter.
[[nodiscard]] bool update_rows(const at::Tensor& parameter, const at::Tensor& gradient,
                               const RowUpdate& update);

}  // namespace stitch::rpc
