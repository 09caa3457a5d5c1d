#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace stitch::testing {

// A random differentiable program over several workers, all of it decided by a seed: operations on
// fp64 (or fp32) tensors, also in place, parameters shared by many calls, calls to other workers
// that make calls themselves, several calls to one worker, branches, views, tensors of size zero,
// undefined results and undefined gradients. The same program runs anywhere: how a call reaches a
// worker and where parameters live is given from outside.
struct RandomProgram {
  std::uint64_t seed = 0;
  int workers = 2;
  bool uses_everything = false;  // no result is dropped or detached: what fast mode needs
  int depth = 3;                 // how deep calls nest
  bool single_precision = false;

  [[nodiscard]] at::ScalarType dtype() const { return single_precision ? at::kFloat : at::kDouble; }

  template <class Archive>
  void serialize(Archive& archive) {
    archive(seed, workers, uses_everything, depth, single_precision);
  }
};

using Tensors = std::vector<at::Tensor>;

// One block of a program: what one call runs.
struct ProgramBlock {
  RandomProgram program;
  std::uint64_t path = 0;  // which block: decides everything in it
  int level = 0;

  template <class Archive>
  void serialize(Archive& archive) {
    archive(program, path, level);
  }
};

struct ProgramHost {
  // Starts a block on a worker and returns how to wait for its results.
  std::function<std::function<Tensors()>(int worker, const ProgramBlock& block,
                                         const Tensors& arguments)>
      call;
  // A parameter of the worker that the block runs on.
  std::function<at::Tensor(int index)> parameter;
};

inline constexpr int kProgramParameters = 3;

// The parameters of one worker: leaves that require grad.
[[nodiscard]] Tensors program_parameters(const RandomProgram& program, int worker);
// Runs one block on the worker that `host` stands for. Results may be undefined.
[[nodiscard]] Tensors run_block(const ProgramHost& host, const ProgramBlock& block,
                                const Tensors& arguments);
// Runs the program and returns its loss.
[[nodiscard]] at::Tensor run_program(const ProgramHost& host, const RandomProgram& program);

}  // namespace stitch::testing
