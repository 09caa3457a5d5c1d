// One worker of a world of processes, for autograd_process_test.cc.
//   autograd_world_program death    worker2 dies in the middle of a backward pass
//   autograd_world_program anomaly  worker2 has anomaly mode on, worker1 has not, worker0 turns it
//                                   on between two passes over each
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "stitch/dist_autograd/context.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/worker.h"

namespace {

using namespace std::chrono_literals;
namespace autograd = stitch::dist_autograd;

struct Dies : torch::autograd::Function<Dies> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x * 1; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list grads) {
    kill(getpid(), SIGKILL);
    return grads;
  }
};

at::Tensor twice(at::Tensor x) { return x * 2; }
at::Tensor deadly(at::Tensor x) { return Dies::apply(x); }
at::Tensor twice_and_on(std::string next, at::Tensor x) {
  return stitch::rpc_sync<deadly>(next, x * 2);
}
std::int64_t contexts_here() {
  return stitch::rpc::current_agent()->debug_info().at("dist_autograd.contexts");
}

int survive() {
  const auto x = torch::ones({3}).requires_grad_();
  {
    autograd::Context context;
    const auto near = stitch::rpc_sync<twice>("worker1", x);
    const auto loss = (near + stitch::rpc_sync<twice_and_on>("worker1", "worker2", x)).sum();
    try {
      context.backward({loss}, {.timeout = 30s});
      return 1;
    } catch (const stitch::Error& error) {
      std::printf("backward: %s, %s\n", std::string(to_string(error.code())).c_str(),
                  error.worker().c_str());
    }
    try {
      static_cast<void>(context.gradients());
      return 1;
    } catch (const stitch::Error& error) {
      std::printf("gradients: %s\n", std::string(to_string(error.code())).c_str());
    }
  }
  {
    autograd::Context context;
    context.backward({stitch::rpc_sync<twice>("worker1", x).sum()});
    std::printf("then: %g\n", context.gradient(x).sum().item<double>());
  }
  for (int i = 0; i < 1000 && stitch::rpc_sync<contexts_here>("worker1") != 0; ++i)
    std::this_thread::sleep_for(10ms);
  std::printf("left: %ld\n", static_cast<long>(stitch::rpc_sync<contexts_here>("worker1")));
  return 0;
}

at::Tensor has_nan_in_backward(at::Tensor x) {
  return (torch::zeros({3}).requires_grad_().sqrt() * 0 + x) * 2;
}
bool anomaly_mode_here() { return torch::autograd::AnomalyMode::is_enabled(); }

// Calls a worker, differentiates the result, and prints what came of that and of its anomaly mode.
void pass_over(const char* worker) {
  autograd::Context context;
  const auto x = torch::ones({3}).requires_grad_();
  const auto loss = stitch::rpc_sync<has_nan_in_backward>(worker, x).sum();
  std::printf("%s: ", worker);
  try {
    context.backward({loss}, {.timeout = 30s});
    std::printf("no error");
  } catch (const stitch::Error& error) {
    const bool nan = std::string(error.what())
                         .find("Function 'SqrtBackward0' returned nan values in its 0th output.") !=
                     std::string::npos;
    std::printf("%s of %s", nan ? "NaN" : error.what(), error.worker().c_str());
  }
  std::printf(", mode %s\n", stitch::rpc_sync<anomaly_mode_here>(worker) ? "on" : "off");
}

int find_nan() {
  for (const bool on : {false, true}) {
    torch::autograd::AnomalyMode::set_enabled(on);
    for (const char* worker : {"worker1", "worker2"}) pass_over(worker);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 2) return 2;
  const bool anomaly = std::string(argv[1]) == "anomaly";
  // Before there are other threads: it is not made for several.
  const char* const rank = std::getenv("RANK");
  if (anomaly && rank != nullptr && std::string(rank) == "2")
    torch::autograd::AnomalyMode::set_enabled(true);
  const auto self = stitch::init();
  if (self.rank() == 0) return anomaly ? find_nan() : survive();
  if (self.rank() == 2 && !anomaly) std::this_thread::sleep_for(60s);  // killed long before
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 3;
}
