// Parameters that move to other owners, and a look at an optimizer's state.
#include "tests/dist_optim/spread_model.h"

namespace replace_test {
namespace {

using namespace spread_model;
using namespace stitch::testing;
using stitch::ErrorCode;
using torch::optim::Adam;
using torch::optim::AdamOptions;

void train(const SpreadModel& model, DistributedOptimizer<Adam>& there, Adam& here, int from,
           int to) {
  for (int i = from; i < to; ++i) {
    autograd::Context context;
    context.backward({model.loss_there(i)});
    EXPECT_EQ(there.step(context), static_cast<std::int64_t>(kParameters));
    model.backward_here(i);
    here.step();
  }
}

// Those of worker 2 move to worker 3, where there was nothing, and to worker 1.
TEST(ReplacedParameters, GoOnAsBeforeWithTheStateThatIsLoaded) {
  Cluster cluster(4);
  const TemporaryFolder temporary;
  SpreadModel model(2);
  DistributedOptimizer<Adam> there{
      {{.parameters = SpreadModel::first(model.references), .options = AdamOptions(0.05)},
       {.parameters = SpreadModel::rest(model.references), .options = AdamOptions(0.01)}}};
  there.set_schedule(stitch::optim::linear({.steps = 10}));
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(SpreadModel::first(model.here), std::make_unique<AdamOptions>(0.05));
  groups.emplace_back(SpreadModel::rest(model.here), std::make_unique<AdamOptions>(0.01));
  Adam here(groups);
  auto train_to = [&, i = 0](int to) mutable {
    for (; i < to; ++i) {
      here.param_groups()[0].options().set_lr(0.05 * (1 - 0.1 * i));
      here.param_groups()[1].options().set_lr(0.01 * (1 - 0.1 * i));
      train(model, there, here, i, i + 1);
    }
  };
  train_to(3);
  there.save(temporary.path() / "saved");
  std::vector<stitch::optim::NamedParameter> others;
  for (const std::size_t i : {1U, 3U}) {
    const auto now = model.holders[i].rpc_sync<&Holder::now>();
    model.holders[i] = stitch::remote<Holder>(stitch::WorkerId(i == 1 ? 3 : 1), now);
    others.emplace_back(std::to_string(i), model.holders[i].rpc_sync<&Holder::parameter>());
  }
  there.replace(others);
  EXPECT_TRUE(there.state("1").empty()) << "it begins anew";
  EXPECT_FALSE(there.state("0").empty());
  EXPECT_TRUE(there.options(1) == AdamOptions(0.01));
  there.load(temporary.path() / "saved");
  EXPECT_FALSE(there.state("1").empty());
  EXPECT_EQ(there.next_step(), 3);
  train_to(6);
  there.add_group({.parameters = {stitch::make_rref(torch::ones({2}).set_requires_grad(true))},
                   .options = AdamOptions(1)});
  train_to(8);
  model.expect_equal(1e-12);
}

TEST(ReplacedParameters, TakeThePlaceOfThoseOfADeadOwner) {
  Cluster cluster(4);
  const TemporaryFolder temporary;
  SpreadModel model(2);
  DistributedOptimizer<Adam> there(model.references, AdamOptions(0.05));
  Adam here(model.here, AdamOptions(0.05));
  train(model, there, here, 0, 2);
  there.save(temporary.path() / "saved");
  std::vector<stitch::optim::NamedParameter> others;
  for (std::size_t i = 1; i < kParameters; i += 2) {
    const auto now = model.holders[i].rpc_sync<&Holder::now>();
    model.holders[i] = stitch::remote<Holder>("worker3", now);
    others.emplace_back(std::to_string(i), model.holders[i].rpc_sync<&Holder::parameter>());
  }
  cluster[2].shutdown({.graceful = false, .timeout = std::chrono::seconds(5)});
  EXPECT_THROW(there.set_lr(1), stitch::Error);
  there.replace(others);
  there.load(temporary.path() / "saved");
  train(model, there, here, 2, 5);
  there.set_lr(0.01);
  model.expect_equal(1e-12);
}

TEST(ReplacedParameters, AreRefusedByName) {
  Cluster cluster(2);
  const SpreadModel model(1);
  DistributedOptimizer<Adam> optimizer({model.references[0]}, AdamOptions(0.1));
  for (const auto& wrong :
       std::vector<std::function<void()>>{[&] {
                                            optimizer.replace({{"w", model.references[1]}});
                                          },
                                          [&] { static_cast<void>(optimizer.state("w")); }}) {
    const auto error = error_of(wrong);
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_STREQ(error.what(), "optimizer has no parameter named \"w\"");
  }
  // The tensor that takes its place may be the same one, or another of that owner.
  optimizer.replace({model.references[1]});
  autograd::Context context;
  context.backward({model.loss_there(0)});
  EXPECT_EQ(optimizer.step(context), 1);
  EXPECT_TRUE(torch::equal(model.holders[0].rpc_sync<&Holder::now>(), model.here[0]));
  EXPECT_FALSE(torch::equal(model.holders[1].rpc_sync<&Holder::now>(), model.here[1]));
}

TEST(OptimizerState, IsLookedAtByName) {
  Cluster cluster(3);
  const SpreadModel model(2);
  DistributedOptimizer<Adam> there(
      {stitch::optim::NamedParameter{"a", model.references[0]}, {"b", model.references[1]}},
      AdamOptions(0.1));
  EXPECT_TRUE(there.state("b").empty());
  autograd::Context context;
  context.backward({model.loss_there(0)});
  there.step(context);
  model.backward_here(0);
  const auto state = there.state("b");
  EXPECT_EQ(std::get<std::int64_t>(state.at("step")), 1);
  EXPECT_TRUE(torch::allclose(std::get<at::Tensor>(state.at("exp_avg")), model.here[1].grad() * 0.1,
                              1e-12, 0));
}

}  // namespace
}  // namespace replace_test
