#include "tests/support/oracle.h"

#include <torch/torch.h>

#include <algorithm>

namespace stitch::testing {

namespace {

ProgramHost local_host(const std::vector<Tensors>& parameters, int worker) {
  ProgramHost host;
  host.parameter = [&parameters, worker](int index) {
    return parameters[static_cast<std::size_t>(worker)][static_cast<std::size_t>(index)];
  };
  host.call = [&parameters](int callee, const ProgramBlock& block, const Tensors& arguments) {
    Tensors results = run_block(local_host(parameters, callee), block, arguments);
    return [results] { return results; };
  };
  return host;
}

}  // namespace

OracleResult run_oracle(const RandomProgram& program, const std::vector<Tensors>& parameters) {
  const at::Tensor loss = run_program(local_host(parameters, 0), program);
  Tensors all;
  for (const Tensors& each : parameters) all.insert(all.end(), each.begin(), each.end());
  const auto gradients = torch::autograd::grad({loss}, all, {}, {}, false, /*allow_unused=*/true);
  OracleResult result;
  result.loss = loss.item<double>();
  auto next = gradients.begin();
  for (const Tensors& each : parameters) {
    result.gradients.emplace_back(next, next + static_cast<std::ptrdiff_t>(each.size()));
    next += static_cast<std::ptrdiff_t>(each.size());
  }
  return result;
}

::testing::AssertionResult equal_gradients(const at::Tensor& got, const at::Tensor& expected,
                                           double tolerance) {
  if (!got.defined() && !expected.defined()) return ::testing::AssertionSuccess();
  const at::Tensor shape = expected.defined() ? expected : got;
  const auto dense = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return at::zeros(shape.sizes(), shape.options().layout(c10::kStrided));
    return (tensor.is_sparse() ? tensor.to_dense() : tensor).detach();
  };
  const at::Tensor a = dense(got), b = dense(expected);
  if (a.sizes() != b.sizes())
    return ::testing::AssertionFailure() << "shape " << a.sizes() << ", expected " << b.sizes();
  if (a.numel() == 0) return ::testing::AssertionSuccess();
  const double scale = std::max(1.0, at::abs(b).max().item<double>());
  const double difference = at::abs(a - b).max().item<double>();
  if (difference <= tolerance * scale) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "differs by " << difference << " at scale " << scale
                                       << (got.defined() ? "" : " (no gradient at all)");
}

}  // namespace stitch::testing
