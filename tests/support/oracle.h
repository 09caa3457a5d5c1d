#pragma once

#include <vector>

#include "tests/support/equal_gradients.h"  // IWYU pragma: export
#include "tests/support/random_program.h"

namespace stitch::testing {

// How the gradients of a program are asked for.
struct Asking {
  bool two_roots = false;     // the loss and a function of it
  bool two_losses = false;    // and a matrix that other calls made, with a gradient of its own
  bool own_seed = false;      // the loss has a gradient of its own, too
  int passes = 1;             // over the same graph
  bool twice = false;         // then differentiate what the first worker's parameters got
  bool twice_remote = false;  // and what those of all others got
};

// What is differentiated, each with its gradient, which is undefined for 1.
struct Roots {
  Tensors tensors;
  Tensors gradients;
};
// Runs the program, or two, and returns the roots that `asking` wants; the loss is the first.
[[nodiscard]] Roots run_for_roots(const ProgramHost& host, const RandomProgram& program,
                                  const Asking& asking);
// Asking::twice: a loss over gradients. Undefined when none of them depends on a parameter.
[[nodiscard]] at::Tensor loss_of_gradients(const Tensors& gradients);

// The loss and gradients of a program run in one process by libtorch's own engine: the reference
// for every other way of running it. gradients[worker][index]; undefined where no gradient came.
struct OracleResult {
  double loss = 0;
  std::vector<Tensors> gradients;
};
// `parameters[worker]` as made by program_parameters(). Their `.grad` is undefined afterwards.
[[nodiscard]] OracleResult run_oracle(const RandomProgram& program,
                                      const std::vector<Tensors>& parameters,
                                      const Asking& asking = {});

}  // namespace stitch::testing
