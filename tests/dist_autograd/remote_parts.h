#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "stitch/dist_autograd/context.h"
#include "stitch/rpc/worker.h"
#include "tests/support/cluster.h"
#include "tests/support/eventually.h"

// Shared by the tests of contexts and backward passes: parameters on workers, and checks of what is
// left there.
namespace stitch::testing {

// The parameter of the worker that runs this: a leaf of shape [3], made on first use, the same for
// all tests of a process.
at::Tensor own_parameter();
inline at::Tensor ones() { return at::ones({3}, at::kDouble); }
inline at::Tensor parameter_of(Worker& worker) {
  const WorkerScope scope(worker);
  return own_parameter();
}

// What runs remotely.
at::Tensor times_parameter(at::Tensor x);  // x * parameter
at::Tensor via(std::vector<std::string> path,
               at::Tensor x);  // times_parameter on each worker of the path in turn

// The gradient of that worker's parameter in a context; undefined when it has none or takes no
// part.
at::Tensor gradient_on(Worker& worker, const dist_autograd::ContextId& context);

inline std::int64_t count_on(Worker& worker, const std::string& what) {
  return worker.debug_info().at("dist_autograd." + what);
}

// What asking that worker for its gradients of a context throws; nothing when it answers.
std::optional<Error> refusal_on(Worker& worker, const dist_autograd::ContextId& context);
// Waits until asking it throws an error of that code with `text` in it.
bool refuses(Worker& worker, const dist_autograd::ContextId& context, ErrorCode code,
             const std::string& text = "");

// Waits until no context, pass, link or gradient is left on any worker.
bool nothing_is_left(Cluster& cluster);

}  // namespace stitch::testing
