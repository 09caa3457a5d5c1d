// A step is taken once by each owner, however often it is asked for.
#include <random>

#include "tests/dist_optim/spread_model.h"

namespace numbered_steps_test {

// Each step takes 1 from every element.
struct CountDown : torch::optim::Optimizer {
  CountDown(std::vector<at::Tensor> parameters, const torch::optim::SGDOptions& options)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                  std::make_unique<torch::optim::SGDOptions>(options)) {}
  at::Tensor step(LossClosure = nullptr) override {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : param_groups()[0].params()) {
      gate().pass();
      parameter.sub_(1);
      if (parameter.dim() == 0) throw stitch::Error(stitch::ErrorCode::internal, "half done");
    }
    return {};
  }
  static stitch::testing::Gate& gate() {
    static auto* const one = [] {
      auto* const made = new stitch::testing::Gate;
      made->open();
      return made;
    }();
    return *one;
  }
};

}  // namespace numbered_steps_test

template <>
struct stitch::optim::OptimizerTraits<numbered_steps_test::CountDown>
    : OptimizerTraits<torch::optim::SGD> {};

namespace numbered_steps_test {
namespace {

using namespace spread_model;
using namespace std::chrono_literals;
using namespace stitch::testing;
using stitch::ErrorCode;
using stitch::optim::LocalOptimizer;
using stitch::optim::StepOrder;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::SGDOptions;

// Answers of workers that `late` names come a while later than those of others.
LoopbackFaults late_answers(std::function<bool(std::uint32_t)> late, std::chrono::milliseconds by) {
  return LoopbackFaults([late = std::move(late), by](std::uint32_t from, std::uint32_t,
                                                     std::uint64_t, const auto& message) {
    const bool answer = kind_of(message) == stitch::rpc::wire::kReply;
    return stitch::transport::Fate{.delay = answer && late(from) ? by : 0ms};
  });
}

TEST(NumberedSteps, AnAnswerThatIsLostIsAskedForAgainAndTheOwnersAreNamed) {
  Cluster cluster(4);
  const SpreadModel model(3);
  DistributedOptimizer<Adam> there(model.references, AdamOptions(0.05));
  Adam here(model.here, AdamOptions(0.05));
  for (int i = 0; i < 4; ++i) {
    autograd::Context context;
    context.backward({model.loss_there(i)});
    if (i % 2 == 0) {
      const auto faults = late_answers([](std::uint32_t from) { return from == 2; }, 1000ms);
      const auto error = error_of([&] { there.step(context, {.timeout = 200ms}); });
      EXPECT_TRUE(has_text(error, ErrorCode::timeout,
                           "; worker1 and worker3 had stepped; worker2 has not answered"));
    }
    const auto result = there.step(context, {});
    EXPECT_EQ(result.stepped, static_cast<std::int64_t>(kParameters));
    EXPECT_EQ(result.step, i);
    model.backward_here(i);
    here.step();
  }
  model.expect_equal(1e-12);
}

// With another norm or scale the second time, that owner would step otherwise than the first.
TEST(NumberedSteps, AStepThatGoesOnIsScaledAsItBegan) {
  Cluster cluster(3);
  const SpreadModel model(2);
  DistributedOptimizer<Adam> there(model.references, AdamOptions(0.05));
  Adam here(model.here, AdamOptions(0.05));
  autograd::Context context;
  context.backward({model.loss_there(0)});
  std::atomic<int> requests{0};
  {
    const LoopbackFaults lost(
        [&](std::uint32_t, std::uint32_t to, std::uint64_t, const auto& message) {
          const bool request = kind_of(message) == stitch::rpc::wire::kRequest && to == 2;
          const bool step = request && ++requests == 2;  // after the wave for the norm
          return stitch::transport::Fate{.delay = step ? 2000ms : 0ms};
        });
    const auto error = error_of([&] { there.step(context, {.max_norm = 0.5, .timeout = 300ms}); });
    EXPECT_TRUE(has_text(error, ErrorCode::timeout, "; worker1 had stepped; worker2 has not"));
  }
  EXPECT_EQ(there.step(context, {.max_norm = 100}).step, 0);
  model.backward_here(0);
  torch::nn::utils::clip_grad_norm_(model.here, 0.5);
  here.step();
  model.expect_equal(1e-12);
}

TEST(NumberedSteps, AnotherStepOfTheSameContextIsANewOne) {
  Cluster cluster(2);
  const SpreadModel model(1);
  DistributedOptimizer<CountDown> optimizer(model.references, SGDOptions(1));
  autograd::Context context;
  context.backward({model.loss_there(0)});
  for (int i = 0; i < 3; ++i) EXPECT_EQ(optimizer.step(context, {}).step, i);
  EXPECT_TRUE(torch::allclose(model.holders[0].rpc_sync<&Holder::now>(),
                              initial(0, at::kDouble) - 3, 0, 1e-12));
}

// On an owner.
struct Owner {
  explicit Owner(const at::Tensor& initial)
      : parameter(initial.clone().set_requires_grad(true)),
        local(stitch::optim::make_local<CountDown>(
            {{{{"w", stitch::make_rref(parameter)}},
              stitch::optim::options_to_values<CountDown>(SGDOptions(1))}},
            stitch::optim::StalePolicy::detect)) {}
  at::Tensor parameter;
  LocalOptimizer local;
};

// A parameter that changes its shape in the middle of a step stands for a device that fails.
TEST(NumberedSteps, AMasterThatCannotBeWrittenBackFailsItsStepAlone) {
  Cluster cluster(1);
  Owner owner(torch::zeros({2}, at::kHalf));
  autograd::Context context;
  context.backward({owner.parameter.sum()});
  CountDown::gate().close();
  std::jthread order([&] {
    const stitch::WorkerScope scope(cluster[0]);
    EXPECT_THROW(owner.local.step(context.id(), {.number = 1}), std::exception);
  });
  EXPECT_TRUE(CountDown::gate().wait_for_arrival());
  const auto memory = owner.parameter.data();
  owner.parameter.set_data(torch::zeros({3}, at::kHalf));
  CountDown::gate().open();
  order.join();
  owner.parameter.set_data(memory);
  EXPECT_EQ(owner.local.step(context.id(), {.number = 2}), 1);
}

TEST(NumberedSteps, ARepeatedOrderWaitsForTheFirstAndHasItsOutcome) {
  Cluster cluster(1);
  Owner owner(torch::zeros({2}));
  std::optional<autograd::ContextId> id;
  {
    autograd::Context context;
    id = context.id();
    context.backward({owner.parameter.sum()});
    CountDown::gate().close();
    std::vector<std::jthread> orders;
    std::atomic<int> ended{0};
    for (int i = 0; i < 3; ++i) {
      orders.emplace_back([&] {
        const stitch::WorkerScope scope(cluster[0]);
        EXPECT_EQ(owner.local.step(*id, {.number = 7}), 1);
        ++ended;
      });
    }
    EXPECT_TRUE(CountDown::gate().wait_for_arrival());
    std::this_thread::sleep_for(50ms);
    EXPECT_EQ(ended, 0);
    CountDown::gate().open();
  }
  EXPECT_EQ(owner.local.step(*id, {.number = 7}), 1) << "the context has ended";
  EXPECT_TRUE(torch::equal(owner.parameter.detach(), torch::full({2}, -1.0)));
  EXPECT_EQ(error_of([&] { owner.local.step(*id, {.number = 8}); }).code(), ErrorCode::cancelled);
}

TEST(NumberedSteps, AFailureIsForgottenUnlessAParameterWasChanged) {
  Cluster cluster(1);
  Owner owner(torch::zeros({}));
  autograd::Context bad, good;
  bad.backward({owner.parameter * 2});
  bad.fail(stitch::Error(ErrorCode::internal, "given up"));
  good.backward({owner.parameter * 2});
  EXPECT_STREQ(error_of([&] { owner.local.step(bad.id(), {.number = 1}); }).what(), "given up");
  for (int i = 0; i < 2; ++i) {
    const auto error = error_of([&] { owner.local.step(good.id(), {.number = 1}); });
    EXPECT_STREQ(error.what(), "half done");
  }
  EXPECT_EQ(owner.parameter.item<float>(), -1) << "the second order has the recorded error";
}

TEST(NumberedSteps, OutcomesAreKeptOfTheLastStepsOnly) {
  Cluster cluster(1);
  Owner owner(torch::zeros({2}));
  autograd::Context context;
  context.backward({owner.parameter.sum()});
  for (std::uint64_t i = 0; i < 300; ++i) owner.local.step(context.id(), {.number = i});
  EXPECT_EQ(owner.local.step(context.id(), {.number = 44}), 1);
  const auto error = error_of([&] { owner.local.step(context.id(), {.number = 43}); });
  EXPECT_TRUE(has_text(error, ErrorCode::out_of_range,
                       "a step is too old to be asked for again: its owner keeps the outcomes of "
                       "the last 256"));
  EXPECT_TRUE(torch::equal(owner.parameter.detach(), torch::full({2}, -300.0)));
}

// While a step is taken, some messages are late, and some connections are cut.
void expect_each_step_once(int steps) {
  Cluster cluster(3);
  const SpreadModel model(2);
  DistributedOptimizer<CountDown> optimizer(model.references, SGDOptions(1));
  std::atomic<bool> stepping{false};
  const LoopbackFaults faults([&](std::uint32_t from, std::uint32_t to, std::uint64_t sequence,
                                  const auto&) {
    if (!stepping) return stitch::transport::Fate{};
    std::minstd_rand random(static_cast<unsigned>(sequence * 31 + from * 7 + to + 1));
    random.discard(3);
    const auto roll = random() % 1000;
    return stitch::transport::Fate{
        .fail = roll < 2, .delay = roll < 20 ? std::chrono::milliseconds(20 + random() % 40) : 0ms};
  });
  int again = 0;
  for (int i = 0; i < steps; ++i) {
    autograd::Context context;
    context.backward({model.loss_there(0)});
    stepping = true;
    for (bool done = false; !done;) {
      try {
        const auto max_norm = i % 2 == 0 ? std::nullopt : std::optional(1e9);  // a wave before it
        EXPECT_EQ(optimizer.step(context, {.max_norm = max_norm, .timeout = 20ms}).stepped,
                  static_cast<std::int64_t>(kParameters));
        done = true;
      } catch (const stitch::Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::timeout) << error.what();
        ++again;
      }
    }
    stepping = false;
  }
  EXPECT_GT(again, steps / 100);
  for (std::size_t i = 0; i < kParameters; ++i) {
    EXPECT_TRUE(torch::allclose(model.holders[i].rpc_sync<&Holder::now>(),
                                initial(i, at::kDouble) - steps, 0, 1e-6))
        << again;
  }
}

TEST(NumberedSteps, AreTakenOnceEachWhereAnswersAreLost) { expect_each_step_once(300); }
TEST(NumberedStepsSweep, AreTakenOnceEachWhereAnswersAreLost) { expect_each_step_once(5'000); }
TEST(NumberedStepsSoak, AreTakenOnceEachWhereAnswersAreLost) { expect_each_step_once(30'000); }

}  // namespace
}  // namespace numbered_steps_test
