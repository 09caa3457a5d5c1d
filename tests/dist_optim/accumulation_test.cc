// Several backward passes of one context before a step.
#include "tests/dist_optim/spread_model.h"

namespace accumulation_test {
namespace {

using namespace spread_model;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

// docs/recipes.md quotes it.
TEST(Accumulation, OverMicroBatchesEqualsAStepOfOneProcessWithTheirMean) {
  for (std::uint32_t owners = 1; owners <= 4; ++owners) {
    const stitch::testing::Cluster cluster(owners + 1);
    const SpreadModel model(owners);
    DistributedOptimizer<AdamW> optimizer(model.references, AdamWOptions(0.05));
    AdamW here(model.here, AdamWOptions(0.05));
    const int micro_batches = 4;
    for (int step = 0; step < 5; ++step) {
      // [tutorial: accumulation]
      stitch::dist_autograd::Context context;
      for (int i = 0; i < micro_batches; ++i) context.backward({model.loss_there(step + i)});
      context.scale_gradients(1.0 / micro_batches);  // on all workers
      optimizer.step(context, {.max_norm = 1.0});
      // [tutorial: end]
      std::vector<at::Tensor> losses;
      for (int i = 0; i < micro_batches; ++i) {
        std::vector<at::Tensor> parts;
        for (const auto& parameter : model.here) parts.push_back(parameter * model.input(step + i));
        losses.push_back(loss_of(parts));
      }
      here.zero_grad();
      torch::stack(losses).mean().backward();
      torch::nn::utils::clip_grad_norm_(model.here, 1.0);
      here.step();
    }
    model.expect_equal(1e-12);
  }
}

}  // namespace
}  // namespace accumulation_test
