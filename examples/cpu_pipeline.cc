// A model in as many stages as there are workers. Micro-batches follow one another through it, so
// that all stages compute at once; gradients come back the same way.
//   stitch-run -n 3 cpu_pipeline
#include <stitch/stitch.h>

#include <cstdio>
#include <vector>

constexpr std::int64_t kWidth = 64;

// A layer that stays where it was made.
class Stage {
 public:
  explicit Stage(std::int64_t seed) {
    torch::manual_seed(static_cast<std::uint64_t>(seed));
    weight_ = (torch::randn({kWidth, kWidth}) / 8).requires_grad_();
  }
  torch::Tensor forward(const torch::Tensor& x) { return torch::tanh(x.mm(weight_)); }
  stitch::RRef<torch::Tensor> parameter() { return stitch::make_rref(weight_); }

 private:
  torch::Tensor weight_;
};

// [tutorial: pipeline]
// One micro-batch through all stages. While it is in one of them, others may be in the rest: a
// coroutine that waits holds no thread.
stitch::Future<torch::Tensor> pass(std::vector<stitch::RRef<Stage>> stages, torch::Tensor x) {
  for (const auto& stage : stages) x = co_await stage.rpc_async<&Stage::forward>(x);
  co_return x;
}

torch::Tensor forward(const std::vector<stitch::RRef<Stage>>& stages, const torch::Tensor& batch) {
  std::vector<stitch::Future<torch::Tensor>> results;
  for (const auto& micro_batch : batch.chunk(4)) results.push_back(pass(stages, micro_batch));
  return torch::cat(stitch::when_all(results).get());
}
// [tutorial: end]

int main() try {
  auto self = stitch::init();
  if (self.rank() != 0) return 0;  // serves until all workers leave

  std::vector<stitch::RRef<Stage>> stages;
  std::vector<stitch::RRef<torch::Tensor>> parameters;
  for (const auto& worker : self.workers()) {
    stages.push_back(stitch::remote<Stage>(worker, std::int64_t{worker.id.value()}));
    parameters.push_back(stages.back().rpc_sync<&Stage::parameter>());
  }
  stitch::optim::DistributedOptimizer<torch::optim::SGD> optimizer(parameters,
                                                                   torch::optim::SGDOptions(0.5));
  torch::manual_seed(7);
  const auto batch = torch::randn({256, kWidth});
  const auto target = torch::tanh(batch.roll(1, 1));
  double first = 0;
  double loss = 0;
  for (int step = 0; step < 40; ++step) {
    stitch::dist_autograd::Context context;
    const auto error = (forward(stages, batch) - target).square().mean();
    context.backward({error});
    optimizer.step(context);
    loss = error.item<double>();
    if (step == 0) first = loss;
  }
  std::printf("%zu stages, 4 micro-batches: loss %.3f after one step, %s after 40\n", stages.size(),
              first, loss < first ? "less" : "no less");
  return 0;
} catch (const stitch::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
