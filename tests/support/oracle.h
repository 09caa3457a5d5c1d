#pragma once

#include <vector>

#include "tests/support/equal_gradients.h"  // IWYU pragma: export
#include "tests/support/random_program.h"

namespace stitch::testing {

// The loss and gradients of a program run in one process by libtorch's own engine: the reference
// for every other way of running it. gradients[worker][index]; undefined where the loss does not
// depend on the parameter.
struct OracleResult {
  double loss = 0;
  std::vector<Tensors> gradients;
};
// `parameters[worker]` as made by program_parameters(). Their `.grad` is not touched.
[[nodiscard]] OracleResult run_oracle(const RandomProgram& program,
                                      const std::vector<Tensors>& parameters);

}  // namespace stitch::testing
