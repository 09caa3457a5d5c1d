// Calls a function on another worker.
//   stitch-run -n 2 hello_rpc
// [tutorial: program]
#include <stitch/stitch.h>

#include <iostream>

torch::Tensor add(torch::Tensor a, torch::Tensor b) { return a + b; }

int main() try {
  auto self = stitch::init();  // who am I: torchrun, srun, mpirun, stitch-run, or Options
  if (self.rank() == 0)
    std::cout << stitch::rpc_sync<add>("worker1", torch::ones(2), torch::ones(2)) << std::endl;
  return 0;  // ~Worker: serves until all want to leave
} catch (const stitch::Error& error) {
  std::cerr << error.what() << std::endl;  // such as: no worker1, or it has died
  return 1;
}
// [tutorial: end]
