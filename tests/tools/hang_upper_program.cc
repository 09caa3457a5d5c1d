// As hang_program.cc, for what references and gradients wait for.
#include <ATen/ATen.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "stitch/dist_autograd/context.h"
#include "stitch/rpc/worker.h"
#include "stitch/rref/rref.h"

using namespace std::chrono_literals;

void hold() { std::this_thread::sleep_for(120s); }
at::Tensor embed(at::Tensor x) { return x * 2; }
at::Tensor make() {
  std::this_thread::sleep_for(120s);
  return at::ones({2});
}

int main(int argc, char** argv) try {
  const auto self = stitch::init();
  // From here on SIGUSR1 is taken.
  std::ofstream(std::string(std::getenv("STITCH_DUMP_DIR")) + "/" + self.name() + ".started");
  const std::string how = argc > 1 ? argv[1] : "";
  std::vector<stitch::Future<void>> held;
  if (self.rank() != 0) std::this_thread::sleep_for(120s);
  if (how == "creation") {
    const auto made = stitch::remote<make>("worker1");
    made.to_here();
  }
  if (how == "backward" || how == "backward that times out") {
    stitch::dist_autograd::Context context;
    const auto x = at::ones({3}).requires_grad_();
    const auto y = stitch::rpc_sync<embed>("worker1", x);
    for (int i = 0; i < 2; ++i) held.push_back(stitch::rpc_async<hold>("worker1"));
    std::this_thread::sleep_for(300ms);  // both threads of worker1 are held before what follows
    if (how == "backward") context.backward({y.sum()});
    try {
      context.backward({y.sum()}, {.timeout = 1s});
    } catch (const stitch::Error& error) {
      std::printf("%s\n", error.what());
    }
    std::this_thread::sleep_for(120s);
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 3;
}
