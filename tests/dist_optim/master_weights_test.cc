// Parameters in half precision: the optimizers step a copy in fp32.
#include "tests/dist_optim/spread_model.h"

namespace master_weights_test {
namespace {

using namespace spread_model;
using namespace stitch::testing;
using stitch::optim::StalePolicy;

at::Tensor start(at::ScalarType dtype) { return torch::linspace(0.5, 1.5, 6).to(dtype); }

// The usual recipe in one process: the master is stepped, and copied into the parameter.
template <class Optimizer>
struct Recipe {
  Recipe(at::ScalarType dtype, const OptionsOf<Optimizer>& options)
      : parameter(start(dtype).set_requires_grad(true)),
        master(parameter.detach().to(at::kFloat).set_requires_grad(true)),
        optimizer(std::vector<at::Tensor>{master}, options) {}
  void step(const at::Tensor& x) {
    parameter.mutable_grad() = at::Tensor();
    (parameter * x).sum().backward();
    master.mutable_grad() = parameter.grad().to(at::kFloat);
    optimizer.step();
    const torch::NoGradGuard no_grad;
    parameter.copy_(master);
  }
  at::Tensor parameter, master;
  Optimizer optimizer;
};

template <class Optimizer>
void expect_the_recipe(const OptionsOf<Optimizer>& options) {
  SCOPED_TRACE(stitch::optim::optimizer_name<Optimizer>());
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    for (const auto policy : {StalePolicy::detect, StalePolicy::allow}) {
      const auto holder = stitch::remote<Holder>("worker1", start(dtype));
      DistributedOptimizer<Optimizer> there({holder.template rpc_sync<&Holder::parameter>()},
                                            options, policy);
      Recipe<Optimizer> here(dtype, options);
      for (int i = 0; i < 30; ++i) {
        const auto x = torch::full({6}, 0.01 * i + 0.1).to(dtype);
        autograd::Context context;
        context.backward({holder.template rpc_async<&Holder::times>(x).get().sum()});
        EXPECT_EQ(there.step(context), 1);
        here.step(x);
        ASSERT_TRUE(torch::equal(holder.template rpc_sync<&Holder::now>(), here.parameter)) << i;
      }
      EXPECT_FALSE(torch::equal(here.master, here.parameter.to(at::kFloat)))
          << "it has more digits";
    }
  }
}

TEST(MasterWeights, AreSteppedAsInTheUsualRecipe) {
  Cluster cluster(2);
  using namespace torch::optim;
  expect_the_recipe<SGD>(SGDOptions(1e-3).momentum(0.9));
  expect_the_recipe<Adam>(AdamOptions(1e-3));
  expect_the_recipe<AdamW>(AdamWOptions(1e-3));
  expect_the_recipe<Adagrad>(AdagradOptions(1e-3));
  expect_the_recipe<RMSprop>(RMSpropOptions(1e-4));
}

// Each step is too small for bf16; the steps of both add up.
TEST(MasterWeights, AreOneForAllOptimizersOfAParameter) {
  Cluster cluster(2);
  const auto holder = stitch::remote<Holder>("worker1", torch::ones({2}).to(at::kBFloat16));
  using torch::optim::SGD;
  std::vector<DistributedOptimizer<SGD>> trainers;
  for (int i = 0; i < 2; ++i)
    trainers.emplace_back(stitch::optim::ParameterList{holder.rpc_sync<&Holder::parameter>()},
                          torch::optim::SGDOptions(0.001), StalePolicy::allow);
  for (int i = 0; i < 100; ++i) {
    autograd::Context context;
    context.backward(
        {holder.rpc_async<&Holder::times>(torch::ones({2}).to(at::kBFloat16)).get().sum()});
    trainers[static_cast<std::size_t>(i % 2)].step(context);
  }
  EXPECT_TRUE(
      torch::equal(holder.rpc_sync<&Holder::now>(), torch::full({2}, 0.9).to(at::kBFloat16)));
}

TEST(MasterWeights, AreReadAgainWhereOthersHaveWrittenTheParameter) {
  Cluster cluster(2);
  const auto holder = stitch::remote<Holder>("worker1", torch::ones({2}).to(at::kBFloat16));
  DistributedOptimizer<torch::optim::SGD> optimizer({holder.rpc_sync<&Holder::parameter>()},
                                                    torch::optim::SGDOptions(0.25));
  const auto step = [&] {
    autograd::Context context;
    context.backward(
        {holder.rpc_async<&Holder::times>(torch::ones({2}).to(at::kBFloat16)).get().sum()});
    optimizer.step(context);
    return holder.rpc_sync<&Holder::now>().to(at::kFloat);
  };
  EXPECT_TRUE(torch::equal(step(), torch::full({2}, 0.75)));
  holder.rpc_sync<&Holder::assign>(torch::full({2}, 8.0).to(at::kBFloat16));
  EXPECT_TRUE(torch::equal(step(), torch::full({2}, 7.75)));
}

// The checkpoint of a model has the rounding alone.
TEST(MasterWeights, AreInTheCheckpointOfTheOptimizer) {
  Cluster cluster(3);
  const TemporaryFolder folder;
  using torch::optim::Adam;
  const auto made = [](const RRef<Holder>& holder) {
    return DistributedOptimizer<Adam>({holder.rpc_sync<&Holder::parameter>()},
                                      torch::optim::AdamOptions(1e-4));
  };
  const auto train = [](const RRef<Holder>& holder, DistributedOptimizer<Adam>& optimizer) {
    for (int i = 0; i < 7; ++i) {
      autograd::Context context;
      const auto x = torch::full({6}, 0.1 * i + 1).to(at::kBFloat16);
      context.backward({holder.rpc_async<&Holder::times>(x).get().sum()});
      optimizer.step(context);
    }
    return holder.rpc_sync<&Holder::now>();
  };
  const auto holder = stitch::remote<Holder>("worker1", start(at::kBFloat16));
  auto optimizer = made(holder);
  const auto saved = train(holder, optimizer);
  optimizer.save(folder.path() / "saved");
  const auto master = std::get<at::Tensor>(optimizer.state("0").at("master"));
  EXPECT_EQ(master.scalar_type(), at::kFloat);
  EXPECT_TRUE(torch::equal(master.to(at::kBFloat16), saved));
  EXPECT_FALSE(torch::equal(master, saved.to(at::kFloat)));
  const auto expected = train(holder, optimizer);
  for (const bool model_first : {true, false}) {
    const auto resumed = stitch::remote<Holder>("worker2", start(at::kBFloat16));
    auto other = made(resumed);
    if (model_first) resumed.rpc_sync<&Holder::assign>(saved);
    other.load(folder.path() / "saved");
    if (!model_first) resumed.rpc_sync<&Holder::assign>(saved);
    EXPECT_TRUE(torch::equal(train(resumed, other), expected)) << model_first;
    EXPECT_TRUE(torch::equal(std::get<at::Tensor>(other.state("0").at("master")),
                             std::get<at::Tensor>(optimizer.state("0").at("master"))));
  }
}

TEST(MasterWeights, GradientsAreUnscaledInFullPrecision) {
  Cluster cluster(2);
  const auto holder = stitch::remote<Holder>("worker1", torch::ones({2}).to(at::kHalf));
  DistributedOptimizer<torch::optim::SGD> optimizer({holder.rpc_sync<&Holder::parameter>()},
                                                    torch::optim::SGDOptions(65536));
  const stitch::optim::GradScaler scaler;
  autograd::Context context;
  // 2^-26 is 0 in fp16.
  const auto x = torch::full({2}, std::ldexp(1.0, -10)).to(at::kHalf);
  context.backward({scaler.scale(holder.rpc_async<&Holder::times>(x).get().to(at::kFloat).sum() *
                                 std::ldexp(1.0, -16))});
  EXPECT_EQ(optimizer.step(context, {.scaler = &scaler}).stepped, 1);
  EXPECT_TRUE(
      torch::equal(holder.rpc_sync<&Holder::now>().to(at::kFloat),
                   torch::full({2}, 1 - std::ldexp(1.0, -10)).to(at::kHalf).to(at::kFloat)));
}

}  // namespace
}  // namespace master_weights_test
