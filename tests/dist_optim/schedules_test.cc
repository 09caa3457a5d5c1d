// Schedules beside the formulas of torch.optim.lr_scheduler, and steps that follow them.
#include <cmath>
#include <numbers>

#include "tests/dist_optim/spread_model.h"

namespace schedules_test {
namespace {

namespace optim = stitch::optim;
using namespace spread_model;
using stitch::ErrorCode;
using stitch::testing::Cluster;
using stitch::testing::error_of;
using stitch::testing::has_text;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr double kPi = std::numbers::pi;

void expect_factors(const optim::Schedule& schedule, int steps,
                    const std::function<double(int)>& expected) {
  for (int t = 0; t < steps; ++t) EXPECT_NEAR(schedule(t), expected(t), 1e-14) << "step " << t;
}

TEST(Schedules, AreThoseOfPython) {
  expect_factors(optim::constant({}), 5, [](int) { return 1.0; });
  // LinearLR: start + (end - start) * min(total_iters, t) / total_iters
  expect_factors(optim::linear({.steps = 8, .first = 0.25, .last = 1}), 12,
                 [](int t) { return 0.25 + 0.75 * std::min(8, t) / 8; });
  // StepLR: gamma ** (t // step_size)
  expect_factors(optim::step({.steps = 3, .factor = 0.5}), 10, [](int t) {
    const double factors[] = {1, 0.5, 0.25, 0.125};
    return factors[t / 3];
  });
  // ExponentialLR: each the last one * gamma
  double last = 1 / 0.9;
  expect_factors(optim::exponential({.factor = 0.9}), 20, [&](int) { return last *= 0.9; });
  // CosineAnnealingLR: eta_min + (base - eta_min) * (1 + cos(pi * t / T_max)) / 2, until T_max
  expect_factors(optim::cosine({.steps = 10, .last = 0.1}), 15, [](int t) {
    return 0.1 + (1 - 0.1) * (1 + std::cos(kPi * std::min(t, 10) / 10)) / 2;
  });
}

// Python: initial = max / div_factor, min = initial / final_div_factor; the first phase ends at
// step pct_start * total - 1, the second at total - 1; in each end + (start - end) / 2 * (1 +
// cos(pi * part)).
TEST(Schedules, OneCycleIsThatOfPython) {
  const double total = 20, top = 0.3 * total - 1;
  const double initial = 1.0 / 25, smallest = initial / 1e4;
  expect_factors(optim::one_cycle({.steps = 20}), 20, [&](int t) {
    if (t <= top) return 1 + (initial - 1) / 2 * (1 + std::cos(kPi * t / top));
    return smallest + (1 - smallest) / 2 * (1 + std::cos(kPi * (t - top) / (total - 1 - top)));
  });
  EXPECT_EQ(optim::one_cycle({.steps = 20})(1000), smallest);
  EXPECT_EQ(optim::one_cycle({.steps = 20})(5), 1.0);
}

// Python: SequentialLR of LinearLR(start_factor=1 / 5, total_iters=4) and the other, milestone 4.
TEST(Schedules, HaveAWarmUpInFront) {
  const auto warm = [](int t) { return 0.2 + 0.8 * t / 4; };
  expect_factors(optim::constant({.warm_up = 4}), 8, [&](int t) { return t < 4 ? warm(t) : 1; });
  expect_factors(optim::cosine({.warm_up = 4, .steps = 10}), 14,
                 [&](int t) { return t < 4 ? warm(t) : (1 + std::cos(kPi * (t - 4) / 10)) / 2; });
  expect_factors(optim::linear({.warm_up = 4, .steps = 8, .first = 0.5, .last = 1}), 12,
                 [&](int t) { return t < 4 ? 0.5 * warm(t) : 0.5 + 0.5 * (t - 4) / 8; });
  expect_factors(optim::step({.warm_up = 4, .steps = 2, .factor = 0.5}), 8,
                 [&](int t) { return t < 4 ? warm(t) : std::pow(0.5, (t - 4) / 2); });
  expect_factors(optim::exponential({.warm_up = 4, .factor = 0.5}), 8,
                 [&](int t) { return t < 4 ? warm(t) : std::pow(0.5, t - 4); });
  EXPECT_DOUBLE_EQ(optim::one_cycle({.warm_up = 4, .steps = 20})(1), 0.4 / 25);
}

TEST(Schedules, RefuseOptionsOutOfRange) {
  const std::pair<std::function<void()>, const char*> refused[] = {
      {[] { static_cast<void>(optim::cosine({})); },
       "schedule with steps of 0 is refused: it must be 1 or more"},
      {[] { static_cast<void>(optim::constant({.warm_up = -1})); },
       "schedule with warm_up of -1 is refused: it must be 0 or more"},
      {[] { static_cast<void>(optim::exponential({.factor = -0.5})); },
       "schedule with factor of -0.5 is refused: it must be a number of 0 or more"},
      {[] { static_cast<void>(optim::linear({.steps = 3, .last = std::nan("")})); },
       "schedule with last of nan is refused: it must be a number of 0 or more"},
      {[] { static_cast<void>(optim::Plateau({.factor = 1})); },
       "schedule with factor of 1 is refused: it must be less than 1"},
      {[] { static_cast<void>(optim::Plateau({.patience = -1})); },
       "schedule with patience of -1 is refused: it must be 0 or more"},
      {[] { static_cast<void>(optim::one_cycle({.steps = 10, .rise = 1})); },
       "schedule with rise of 1 is refused: it must be such that it and the fall have steps"}};
  for (const auto& [make, text] : refused) EXPECT_STREQ(error_of(make).what(), text);
}

// Python's ReduceLROnPlateau with patience 1, cooldown 1: an observation that is no better is bad,
// the second bad one in turn reduces, and the one after that does not count.
TEST(Schedules, APlateauReducesTheRateOnceAMetricHasGotNoBetterForAWhile) {
  optim::Plateau plateau(
      {.factor = 0.5, .patience = 1, .threshold = 0.1, .cooldown = 1, .min = 0.2});
  const std::pair<double, double> seen[] = {{4, 1},    {3, 1},     {2.9, 1},   {2.8, 0.5},
                                            {5, 0.5},  {2.9, 0.5}, {2.6, 0.5}, {2.6, 0.5},
                                            {9, 0.25}, {9, 0.25},  {9, 0.25},  {std::nan(""), 0.2}};
  optim::Plateau::State saved;
  for (const auto& [metric, factor] : seen) {
    EXPECT_EQ(plateau.observe(metric), factor) << metric;
    saved = plateau.state();
    plateau =
        optim::Plateau({.factor = 0.5, .patience = 1, .threshold = 0.1, .cooldown = 1, .min = 0.2});
    plateau.set_state(saved);  // as by a trainer that is started again
  }
  EXPECT_EQ(optim::Plateau({.absolute = true, .greater_is_better = true}).observe(-5), 1);
}

// Sets the rates of both groups as a scheduler of torch does.
template <class Optimizer>
void multiply_rates(Optimizer& optimizer, const std::array<double, 2>& base, double factor) {
  for (std::size_t g = 0; g < 2; ++g)
    optimizer.param_groups()[g].options().set_lr(base[g] * factor);
}

TEST(Schedules, ThatReturnARateThatNoStepCanHaveAreRefused) {
  Cluster cluster(2);
  const SpreadModel model(1);
  DistributedOptimizer<SGD> optimizer(model.references, SGDOptions(0.1));
  autograd::Context context;
  context.backward({model.loss_there(0)});
  for (const double rate : {-1.0, std::nan(""), 1.0 / 0.0}) {
    optimizer.set_schedule([rate](std::int64_t) { return rate; });
    EXPECT_TRUE(has_text(error_of([&] { (void)optimizer.step(context); }),
                         stitch::ErrorCode::invalid_argument, "for step 0; it takes a finite"));
    EXPECT_EQ(optimizer.next_step(), 0);
  }
  optimizer.set_schedule(nullptr);
  EXPECT_EQ(optimizer.step(context, {.max_norm = 1, .timeout = std::chrono::nanoseconds(0)}).step,
            0);
}

TEST(Schedules, AreAppliedWithTheStepTheyBelongTo) {
  std::array<double, 2> base{};
  expect_same_training_of_each(
      [&](auto& optimizer, const autograd::Context& context, int i) {
        if (i == 0) {
          optimizer.set_schedule(optim::cosine({.warm_up = 3, .steps = 8, .last = 0.1}));
          base = {optimizer.options(0).lr(), optimizer.options(1).lr()};
        }
        EXPECT_EQ(optimizer.step(context, {.max_norm = 0.8}).step, i);
        EXPECT_EQ(optimizer.next_step(), i + 1);
        EXPECT_EQ(optimizer.options(0).lr(), base[0]) << "the rate itself stays";
      },
      [&](auto& optimizer, const auto& parameters, int i) {
        torch::nn::utils::clip_grad_norm_(parameters, 0.8);
        multiply_rates(optimizer, base,
                       i < 3 ? (i + 1) / 4.0 : 0.1 + 0.9 * (1 + std::cos(kPi * (i - 3) / 8)) / 2);
        optimizer.step();
      });
}

TEST(Schedules, MultiplyRatesThatAreSetMeanwhileAndEnd) {
  expect_same_training<SGD>(
      SGDOptions(0.05).momentum(0.9), SGDOptions(0.01),
      [](auto& optimizer, const autograd::Context& context, int i) {
        if (i == 1) optimizer.set_schedule(optim::exponential({.factor = 0.5}));
        if (i == 3) optimizer.set_lr(0, 0.2);
        if (i == 5) optimizer.set_options(1, SGDOptions(0.1).momentum(0.5));
        if (i == 7) optimizer.set_schedule({});
        optimizer.step(context);
      },
      [](SGD& optimizer, const auto&, int i) {
        if (i == 5) static_cast<SGDOptions&>(optimizer.param_groups()[1].options()).momentum(0.5);
        multiply_rates(optimizer, {i < 3 ? 0.05 : 0.2, i < 5 ? 0.01 : 0.1},
                       i >= 1 && i < 7 ? std::pow(0.5, i) : 1);
        optimizer.step();
      });
}

// A trainer that starts again has the parameters, as its own business, and loads the optimizer.
TEST(Schedules, GoOnWhereTheyWereAfterARestart) {
  Cluster cluster(3);
  const stitch::testing::TemporaryFolder folder;
  const SpreadModel model(2), again(1);
  const auto made = [](const SpreadModel& of) {
    DistributedOptimizer<AdamW> optimizer{
        {{.parameters = SpreadModel::first(of.references), .options = AdamWOptions(0.05)},
         {.parameters = SpreadModel::rest(of.references), .options = AdamWOptions(0.01)}}};
    optimizer.set_schedule(optim::one_cycle({.steps = 8}));
    return optimizer;
  };
  const auto step = [](const SpreadModel& of, DistributedOptimizer<AdamW>& optimizer, int i) {
    autograd::Context context;
    context.backward({of.loss_there(i)});
    return optimizer.step(context, {}).step;
  };
  auto optimizer = made(model), resumed = made(again);
  for (int i = 0; i < 4; ++i) step(model, optimizer, i);
  optimizer.save(folder.path() / "checkpoint");
  for (std::size_t i = 0; i < kParameters; ++i)
    again.holders[i].rpc_sync<&Holder::assign>(model.holders[i].rpc_sync<&Holder::now>());
  resumed.load(folder.path() / "checkpoint");
  EXPECT_EQ(resumed.next_step(), 4);
  for (int i = 4; i < 8; ++i) {
    EXPECT_EQ(step(model, optimizer, i), i);
    EXPECT_EQ(step(again, resumed, i), i);
  }
  for (std::size_t i = 0; i < kParameters; ++i)
    EXPECT_TRUE(torch::equal(model.holders[i].rpc_sync<&Holder::now>(),
                             again.holders[i].rpc_sync<&Holder::now>()));
}

// A pass that fails takes no step, and no number.
TEST(Schedules, CountTheStepsThatWereTaken) {
  Cluster cluster(2);
  const SpreadModel model(1);
  DistributedOptimizer<SGD> optimizer(model.references, SGDOptions(0.1));
  {
    autograd::Context context;
    auto loss = model.loss_there(0);
    loss.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("fails"); });
    EXPECT_THROW(optim::backward_and_step(context, {loss * 1}, optimizer), stitch::Error);
    EXPECT_THROW(optimizer.step(context), stitch::Error);
    EXPECT_EQ(optimizer.next_step(), 0);
  }
  autograd::Context context;
  optim::backward_and_step(context, {model.loss_there(0)}, optimizer);
  EXPECT_EQ(optimizer.next_step(), 1);
  optimizer.set_schedule([](std::int64_t) -> double { throw std::runtime_error("no such step"); });
  EXPECT_STREQ(error_of([&] { optimizer.step(context); }).what(),
               "std::runtime_error: no such step");
}

// docs/recipes.md quotes it.
TEST(Schedules, TrainWithGroupsAndClipping) {
  Cluster cluster(3);
  const SpreadModel model(2);
  const auto weights = SpreadModel::first(model.references);
  const auto biases = SpreadModel::rest(model.references);
  const double before = model.loss_there(0).item<double>();
  // [tutorial: groups]
  stitch::optim::DistributedOptimizer<AdamW> optimizer{
      {{.parameters = weights, .options = AdamWOptions(1e-2).weight_decay(0.1)},
       {.parameters = biases, .options = AdamWOptions(1e-2)}}};
  optimizer.set_schedule(stitch::optim::cosine({.warm_up = 10, .steps = 50}));
  for (int step = 0; step < 60; ++step) {
    stitch::dist_autograd::Context context;
    context.backward({model.loss_there(step)});
    const auto result = optimizer.step(context, {.max_norm = 1.0});
    if (result.skipped) std::cerr << "step " << result.step << ": norm " << result.norm << '\n';
  }
  // [tutorial: end]
  EXPECT_LT(model.loss_there(0).item<double>(), before);
  EXPECT_EQ(optimizer.next_step(), 60);
}

}  // namespace
}  // namespace schedules_test
