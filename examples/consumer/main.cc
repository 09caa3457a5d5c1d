// The smallest program built against an installed stitch. Run it with: stitch-run -n 2 ./consumer
#include <stitch/stitch.h>
#include <torch/torch.h>

#include <iostream>

torch::Tensor add(torch::Tensor a, torch::Tensor b) { return a + b; }

int main() {
  auto self = stitch::init();
  if (self.rank() == 0) {
    std::cout << stitch::rpc_sync<add>("worker1", torch::ones(2), torch::ones(2)) << std::endl;
  }
}
