#pragma once

#include <vector>

#include "tests/support/equal_gradients.h"  // IWYU pragma: export
#include "tests/support/random_program.h"

namespace stitch::testing {

// How the gradients of a program are asked for.
struct Asking {
  bool two_roots = false;  // the loss and a function of it
  int passes = 1;          // over the same graph
  bool twice = false;      // then differentiate what the first worker's parameters got
};

// The roots that `asking` wants for a loss.
[[nodiscard]] Tensors roots_of(const at::Tensor& loss, const Asking& asking);
// Asking::twice: a loss over gradients. Undefined when none of them depends on a parameter.
[[nodiscard]] at::Tensor loss_of_gradients(const Tensors& gradients);

// The loss and gradients of a program run in one process by libtorch's own engine: the reference
// for every other way of running it. gradients[worker][index]; undefined where no gradient came.
// The tensors of one message share a node, as they do between workers: when one of them is used,
// backward goes through all.
struct OracleResult {
  double loss = 0;
  std::vector<Tensors> gradients;
};
// `parameters[worker]` as made by program_parameters(). Their `.grad` is undefined afterwards.
[[nodiscard]] OracleResult run_oracle(const RandomProgram& program,
                                      const std::vector<Tensors>& parameters,
                                      const Asking& asking = {});

}  // namespace stitch::testing
