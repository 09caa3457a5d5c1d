// One worker of a world of processes, for autograd_process_test.cc: worker2 has anomaly mode on,
// worker1 has not, worker0 turns it on between two passes over each.
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "stitch/dist_autograd/context.h"
#include "stitch/rpc/worker.h"

namespace {

using namespace std::chrono_literals;
namespace autograd = stitch::dist_autograd;

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

int main() try {
  // Before there are other threads: it is not made for several.
  const char* const rank = std::getenv("RANK");
  if (rank != nullptr && std::string(rank) == "2") torch::autograd::AnomalyMode::set_enabled(true);
  const auto self = stitch::init();
  return self.rank() == 0 ? find_nan() : 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 3;
}
