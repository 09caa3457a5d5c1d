// Trains a critic that lives on another worker until the gradient of its score with respect to its
// input has norm 1 everywhere, as the critic of a Wasserstein GAN is penalized. The loss is made of
// a gradient, so backward runs twice over both workers.
//   stitch-run -n 2 gradient_penalty
#include <stitch/stitch.h>

#include <cstdio>

namespace autograd = stitch::dist_autograd;

// Two layers that stay where they were made.
class Critic {
 public:
  Critic(std::int64_t in, std::int64_t hidden) {
    torch::manual_seed(1);
    hidden_ = (torch::randn({in, hidden}) * 0.3).requires_grad_();
    output_ = (torch::randn({hidden, 1}) * 0.3).requires_grad_();
  }
  torch::Tensor score(const torch::Tensor& x) {
    return torch::matmul(torch::tanh(torch::matmul(x, hidden_)), output_);
  }
  std::vector<stitch::RRef<torch::Tensor>> parameters() {
    return {stitch::make_rref(hidden_), stitch::make_rref(output_)};
  }

 private:
  torch::Tensor hidden_, output_;
};

int main() {
  auto self = stitch::init();
  if (self.rank() != 0) return 0;  // worker1 serves until all workers leave

  const auto critic = stitch::remote<Critic>("worker1", 4, 16);
  stitch::optim::DistributedOptimizer<torch::optim::Adam> optimizer(
      critic.rpc_sync<&Critic::parameters>(), torch::optim::AdamOptions(0.02));
  torch::manual_seed(2);
  const auto x = torch::randn({32, 4}).requires_grad_();

  for (int step = 0; step <= 100; ++step) {
    autograd::Context context;
    const auto score = critic.rpc_sync<&Critic::score>(x).sum();
    // The gradient of the score, itself differentiable. The critic's parameters get nothing yet.
    context.backward({score}, {.create_graph = true, .inputs = {x}});
    const auto norm = context.gradient(x).norm(2, 1);
    const auto penalty = (norm - 1).square().mean();
    context.backward({penalty});  // through that gradient, into the parameters on worker1
    optimizer.step(context);
    if (step % 25 == 0) {
      std::printf("step %3d  penalty %.4f  mean norm of the gradient %.3f\n", step,
                  penalty.item<double>(), norm.mean().item<double>());
    }
  }
}
