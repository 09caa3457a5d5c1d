// Differentiates a loss that two workers compute together, and steps a parameter that lives on the
// other one.
//   stitch-run -n 2 two_worker_autograd
#include <stitch/stitch.h>

#include <cstdio>

namespace autograd = stitch::dist_autograd;

// A linear layer that stays where it was made.
class Layer {
 public:
  Layer(std::int64_t in, std::int64_t out)
      : weight_(torch::full({out, in}, 0.5, torch::requires_grad())) {}
  torch::Tensor forward(const torch::Tensor& x) { return torch::matmul(x, weight_.t()); }
  stitch::RRef<torch::Tensor> weight() { return stitch::make_rref(weight_); }

 private:
  torch::Tensor weight_;
};

int main() {
  auto self = stitch::init();
  if (self.rank() != 0) return 0;  // worker1 serves until all workers leave

  const auto layer = stitch::remote<Layer>("worker1", 4, 2);
  const std::vector<stitch::RRef<torch::Tensor>> parameters{layer.rpc_sync<&Layer::weight>()};
  stitch::optim::DistributedOptimizer<torch::optim::SGD> optimizer(parameters,
                                                                   torch::optim::SGDOptions(0.05));

  const auto input = torch::eye(4);
  const auto target = torch::ones({4, 2});
  for (int step = 0; step <= 20; ++step) {
    autograd::Context context;  // calls made while it is current carry it
    const auto output = layer.rpc_async<&Layer::forward>(input);
    const auto loss = (output.get() - target).square().sum();
    context.backward({loss});  // runs on both workers
    optimizer.step(context);   // the owner of the weight steps it
    if (step % 5 == 0) std::printf("step %2d  loss %.4f\n", step, loss.item<double>());
  }
}
