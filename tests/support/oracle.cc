#include "tests/support/oracle.h"

#include <torch/torch.h>

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

}  // namespace stitch::testing
