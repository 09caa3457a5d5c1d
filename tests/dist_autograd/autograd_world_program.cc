// One worker of a world of processes, for autograd_process_test.cc: worker2 dies in the middle of a
// backward pass.
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
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

}  // namespace

int main() try {
  const auto self = stitch::init();
  if (self.rank() == 0) return survive();
  if (self.rank() == 2) std::this_thread::sleep_for(60s);  // killed long before
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 3;
}
