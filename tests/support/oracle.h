#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "tests/support/random_program.h"

namespace stitch::testing {

// The loss and gradients of a program that runs in one process under the local engine: what every
// other way of running it must give. gradients[worker][index]; undefined where the loss does not
// depend on the parameter.
struct OracleResult {
  double loss = 0;
  std::vector<Tensors> gradients;
};
// `parameters[worker]` as made by program_parameters(). Their `.grad` stays as it is.
[[nodiscard]] OracleResult run_oracle(const RandomProgram& program,
                                      const std::vector<Tensors>& parameters);

// Equal within `tolerance` relative to the largest element expected. An undefined gradient equals
// zeros.
[[nodiscard]] ::testing::AssertionResult equal_gradients(const at::Tensor& got,
                                                         const at::Tensor& expected,
                                                         double tolerance = 1e-12);

}  // namespace stitch::testing
