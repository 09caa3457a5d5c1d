#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace stitch::testing {

// A random differentiable program over several workers, determined by its seed: operations on
// tensors of any floating or complex dtype, also in place, parameters shared by many calls, calls
// to other workers that make calls themselves, several calls to one worker, branches, views, empty
// tensors, complex intermediates, undefined results and undefined gradients, and on request hooks
// and sparse gradients. A ProgramHost decides how calls reach workers and where parameters live.
struct RandomProgram {
  std::uint64_t seed = 0;
  int workers = 2;
  bool uses_everything = false;  // no result is dropped or detached, as fast mode requires
  int depth = 3;                 // of nested calls
  at::ScalarType dtype = at::kDouble;
  bool hooks = false;   // not linear: on tensors, also as they came in and on parameters, on nodes
  bool sparse = false;  // lookups in parameters, also in those of the caller
  // Received tensors are changed in place, whole or in part, before anything else uses them.
  bool in_place = false;
  // Parameters that are looked up in have no other use: libtorch cannot differentiate the sum of a
  // sparse gradient and a dense one.
  bool tables_apart = false;
  // CUDA devices that tensors are on, those of one message on several; 0: on the CPU.
  int devices = 0;

  template <class Archive>
  void serialize(Archive& archive) {
    archive(seed, workers, uses_everything, depth, dtype, hooks, sparse, in_place, tables_apart,
            devices);
  }
};

using Tensors = std::vector<at::Tensor>;

// One block of a program: the body of one call.
struct ProgramBlock {
  RandomProgram program;
  std::uint64_t path = 0;  // identifies the block; seeds its operations
  int level = 0;
  bool table = false;  // the last argument is a parameter of the caller, to look up rows in

  template <class Archive>
  void serialize(Archive& archive) {
    archive(program, path, level, table);
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

// The parameters of one worker: leaves that require grad, with their hooks.
[[nodiscard]] Tensors program_parameters(const RandomProgram& program, int worker);
// Runs one block on the worker that `host` stands for. Results may be undefined.
[[nodiscard]] Tensors run_block(const ProgramHost& host, const ProgramBlock& block,
                                const Tensors& arguments);
// Runs the program and returns its loss, a real number.
[[nodiscard]] at::Tensor run_program(const ProgramHost& host, const RandomProgram& program);
// Runs another program over the same parameters, with calls of its own, and returns a 3x3 matrix
// that needs a gradient to be differentiated.
[[nodiscard]] at::Tensor run_second_program(const ProgramHost& host, const RandomProgram& program);
// A random 3x3 matrix for the root of that number.
[[nodiscard]] at::Tensor program_seed(const RandomProgram& program, std::uint64_t root);

// ---- over workers, in calls

// The parameters of the programs that run, by seed and worker. Thread contract: any thread.
class ParametersOfPrograms {
 public:
  void put(std::uint64_t seed, std::vector<Tensors> all) {
    const std::lock_guard lock(mutex_);
    all_[seed] = std::move(all);
  }
  void remove(std::uint64_t seed) {
    const std::lock_guard lock(mutex_);
    all_.erase(seed);
  }
  at::Tensor get(std::uint64_t seed, std::uint32_t worker, int index) {
    const std::lock_guard lock(mutex_);
    return all_.at(seed).at(worker).at(static_cast<std::size_t>(index));
  }

 private:
  std::mutex mutex_;
  std::map<std::uint64_t, std::vector<Tensors>> all_;
};
[[nodiscard]] ParametersOfPrograms& parameters();
// The current worker: blocks run on others by calls.
[[nodiscard]] ProgramHost remote_host(std::uint64_t seed);

}  // namespace stitch::testing
