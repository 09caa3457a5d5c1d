#include "tests/dist_optim/spread_model.h"

namespace groups_test {
namespace {

using namespace spread_model;
using stitch::ErrorCode;
using stitch::optim::NamedParameter;
using stitch::testing::Cluster;
using stitch::testing::error_of;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

const auto step_there = [](auto& optimizer, const autograd::Context& context, int) {
  EXPECT_EQ(optimizer.step(context), static_cast<std::int64_t>(kParameters));
};
const auto step_here = [](auto& optimizer, const auto&, int) { optimizer.step(); };

TEST(ParameterGroups, AreSteppedWithOptionsOfTheirOwn) {
  expect_same_training_of_each(step_there, step_here);
}

TEST(ParameterGroups, GetOtherOptionsOrRatesByThemselvesOrTogether) {
  expect_same_training<SGD>(
      SGDOptions(0.05), SGDOptions(0.01).momentum(0.9),
      [](auto& optimizer, const autograd::Context& context, int i) {
        if (i == 2) optimizer.set_options(1, SGDOptions(0.03).momentum(0.5));
        if (i == 4) optimizer.set_lr(0, 0.02);
        if (i == 6) optimizer.set_lr(0.04);
        if (i == 7) {
          EXPECT_TRUE(optimizer.options(0) == SGDOptions(0.04));
          EXPECT_TRUE(optimizer.options(1) == SGDOptions(0.04).momentum(0.5));
        }
        if (i == 8) optimizer.set_options(SGDOptions(0.01).momentum(0.1));
        optimizer.step(context);
      },
      [](SGD& optimizer, const auto&, int i) {
        const auto options = [&](std::size_t group) -> SGDOptions& {
          return static_cast<SGDOptions&>(optimizer.param_groups()[group].options());
        };
        if (i == 2) options(1).lr(0.03).momentum(0.5);
        if (i == 4) options(0).lr(0.02);
        if (i == 6) options(0).lr(0.04), options(1).lr(0.04);
        if (i == 8) options(0) = options(1) = SGDOptions(0.01).momentum(0.1);
        optimizer.step();
      });
}

// The group that comes later is of an owner that has a group, and of one that has none.
TEST(ParameterGroups, AreAddedLater) {
  Cluster cluster(3);
  const SpreadModel model(2);
  DistributedOptimizer<Adam> there({model.references[0]}, AdamOptions(0.05));
  Adam here({model.here[0]}, AdamOptions(0.05));
  for (int i = 0; i < 6; ++i) {
    if (i == 3) {
      there.add_group(
          {.parameters = {model.references[2], model.references[1]}, .options = AdamOptions(0.01)});
      here.add_param_group({{model.here[2], model.here[1]}, std::make_unique<AdamOptions>(0.01)});
    }
    if (i == 4) {  // on owners that had no part before, too
      there.set_lr(1, 0.02);
      here.param_groups()[1].options().set_lr(0.02);
    }
    autograd::Context context;
    context.backward({model.loss_there(i)});
    EXPECT_EQ(there.step(context), i < 3 ? 1 : 3);
    model.backward_here(i);
    here.step();
  }
  model.expect_equal(1e-12);
  EXPECT_FALSE(torch::equal(model.here[1], initial(1, at::kDouble)));
}

TEST(ParameterGroups, ThatAnOwnerRefusesAreAddedNowhere) {
  Cluster cluster(3);
  const SpreadModel model(2);
  DistributedOptimizer<SGD> optimizer({model.references[0], model.references[1]}, SGDOptions(0.1));
  const auto again = model.holders[1].rpc_sync<&Holder::parameter>();
  const auto error = error_of([&] {
    optimizer.add_group({.parameters = {model.references[2], again}, .options = SGDOptions(1)});
  });
  EXPECT_NE(std::string(error.what())
                .find("optimizer was given one tensor as parameter \"1\" of group 0 and \"3\" of "
                      "group 1: every step would change it twice"),
            std::string::npos)
      << error.what();
  EXPECT_THROW(static_cast<void>(optimizer.options(1)), stitch::Error);
  autograd::Context context;
  context.backward({model.loss_there(0)});
  EXPECT_EQ(optimizer.step(context), 2);
  optimizer.add_group({.parameters = {model.references[2]}, .options = SGDOptions(1)});
  EXPECT_EQ(optimizer.step(context), 3);
}

// By the same reference, and by two references to one tensor.
TEST(ParameterGroups, HaveATensorOnceThatTheyAreGivenTwice) {
  Cluster cluster(2);
  const SpreadModel model(1);
  DistributedOptimizer<SGD> optimizer({NamedParameter{"down", model.references[0]},
                                       {"up", model.references[0]},
                                       {"head", model.holders[0].rpc_sync<&Holder::parameter>()}},
                                      SGDOptions(0.1));
  SGD here({model.here[0]}, SGDOptions(0.1));
  autograd::Context context;
  context.backward({model.loss_there(0)});
  EXPECT_EQ(optimizer.step(context), 1);
  model.backward_here(0);
  here.step();
  model.expect_equal(1e-12);
}

TEST(ParameterGroups, AreRefusedByName) {
  Cluster cluster(2);
  const SpreadModel model(1);
  auto error = error_of([&] {
    const DistributedOptimizer<SGD> optimizer{
        {{.parameters = std::vector<NamedParameter>{{"w", model.references[0]}},
          .options = SGDOptions(0.1)},
         {.parameters = {{"w", model.references[1]}}, .options = SGDOptions(0.2)}}};
  });
  EXPECT_STREQ(error.what(), "optimizer was given two parameters named \"w\"");
  DistributedOptimizer<SGD> optimizer(model.references, SGDOptions(0.1));
  for (const auto& wrong : std::vector<std::function<void()>>{
           [&] { optimizer.set_options(1, SGDOptions(0.1)); }, [&] { optimizer.set_lr(1, 0.1); },
           [&] { static_cast<void>(optimizer.options(1)); }}) {
    error = error_of(wrong);
    EXPECT_EQ(error.code(), ErrorCode::out_of_range);
    EXPECT_STREQ(error.what(), "group 1 does not exist: this optimizer has 1");
  }
  error = error_of([&] { optimizer.set_lr(-1); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_NE(std::string(error.what()).find("are refused: Invalid learning rate: -1"),
            std::string::npos)
      << error.what();
}

TEST(ParameterGroups, AreOnePartOfACheckpoint) {
  Cluster cluster(4);
  const stitch::testing::TemporaryFolder temporary;
  const auto folder = temporary.path() / "checkpoint";
  const SpreadModel model(2), resumed(3);
  const auto made = [&](const SpreadModel& of, double first, double rest) {
    return DistributedOptimizer<Adam>{
        {{.parameters = SpreadModel::first(of.references),
          .options = AdamOptions(first).betas({0.5, 0.75})},
         {.parameters = SpreadModel::rest(of.references), .options = AdamOptions(rest)}}};
  };
  auto optimizer = made(model, 0.05, 0.01);
  auto other = made(resumed, 9, 9);
  const auto step = [](const SpreadModel& of, DistributedOptimizer<Adam>& with, int i) {
    autograd::Context context;
    context.backward({of.loss_there(i)});
    with.step(context);
  };
  for (int i = 0; i < 3; ++i) step(model, optimizer, i);
  optimizer.save(folder);
  for (std::size_t i = 0; i < kParameters; ++i)  // parameters are the program's
    resumed.holders[i].rpc_sync<&Holder::assign>(model.holders[i].rpc_sync<&Holder::now>());
  other.load(folder);
  EXPECT_TRUE(other.options(0) == AdamOptions(0.05).betas({0.5, 0.75}));
  EXPECT_TRUE(other.options(1) == AdamOptions(0.01));
  step(model, optimizer, 3);
  step(resumed, other, 3);
  for (std::size_t i = 0; i < kParameters; ++i)
    EXPECT_TRUE(torch::equal(model.holders[i].rpc_sync<&Holder::now>(),
                             resumed.holders[i].rpc_sync<&Holder::now>()));
  DistributedOptimizer<Adam> of_one(model.references, AdamOptions(0.1));
  const auto error = error_of([&] { of_one.load(folder); });
  EXPECT_NE(std::string(error.what()).find("this optimizer has parameter groups: 1"),
            std::string::npos)
      << error.what();
}

}  // namespace
}  // namespace groups_test
