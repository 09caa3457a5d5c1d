#include "stitch/dist_optim/step_plan.h"
#include "tests/support/world_test.h"

namespace distributed_optimizer_test {
// An optimizer of a program's own: it steps by the sign of the gradient.
struct SignOptions : torch::optim::OptimizerCloneableOptions<SignOptions> {
  SignOptions(double rate = 0) : rate(rate) {}
  double rate;
};
class SignDescent : public torch::optim::Optimizer {
 public:
  SignDescent(std::vector<at::Tensor> parameters, SignOptions options)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                  std::make_unique<SignOptions>(options)) {}
  at::Tensor step(LossClosure = nullptr) override {
    const torch::NoGradGuard no_grad;
    for (auto& group : param_groups()) {
      for (auto& parameter : group.params())
        parameter.sub_(static_cast<SignOptions&>(group.options()).rate * parameter.grad().sign());
    }
    return {};
  }
};

// It takes a while between reading a parameter and writing it: steps that overlap lose updates.
class SlowDescent : public SignDescent {
 public:
  using SignDescent::SignDescent;
  at::Tensor step(LossClosure = nullptr) override {
    const torch::NoGradGuard no_grad;
    auto& parameter = param_groups().front().params().front();
    const auto before = parameter.clone();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    parameter.copy_(before - parameter.grad());
    return {};
  }
};

}  // namespace distributed_optimizer_test

template <>
struct stitch::optim::OptimizerTraits<distributed_optimizer_test::SignDescent> {
  using Options = distributed_optimizer_test::SignOptions;
  static void options(auto& options, auto&& field) { field("rate", options.rate); }
};
template <>
struct stitch::optim::OptimizerTraits<distributed_optimizer_test::SlowDescent>
    : OptimizerTraits<distributed_optimizer_test::SignDescent> {};

namespace distributed_optimizer_test {

namespace {

namespace autograd = stitch::dist_autograd;
using namespace stitch::testing;
using stitch::optim::DistributedOptimizer;

// A parameter and what is computed from it, on one worker.
class Holder {
 public:
  explicit Holder(at::Tensor initial) : parameter_(initial.clone().set_requires_grad(true)) {}
  RRef<at::Tensor> parameter() { return make_rref(parameter_); }
  at::Tensor times(const at::Tensor& x) { return parameter_ * x; }
  at::Tensor squared() { return parameter_.pow(2); }
  at::Tensor now() { return parameter_.detach().clone(); }
  bool has_grad() { return parameter_.grad().defined(); }

 private:
  at::Tensor parameter_;
};

at::Tensor initial(int which) {
  return torch::linspace(0.5 + which, 2.0 + which, 6, torch::kDouble);
}

// Holders on worker 1 and worker 2, and the same parameters here, stepped by plain torch::optim.
struct Twins {
  std::vector<RRef<Holder>> holders{remote<Holder>("worker1", initial(0)),
                                    remote<Holder>("worker2", initial(1))};
  std::vector<at::Tensor> local{initial(0).set_requires_grad(true),
                                initial(1).set_requires_grad(true)};
  [[nodiscard]] std::vector<RRef<at::Tensor>> parameters() const {
    std::vector<RRef<at::Tensor>> references;
    for (const auto& holder : holders) references.push_back(holder.rpc_sync<&Holder::parameter>());
    return references;
  }
};

template <class Optimizer>
void expect_same_trajectory(const stitch::optim::OptionsOf<Optimizer>& options) {
  Cluster cluster(3);
  Twins twins;
  DistributedOptimizer<Optimizer> remote_optimizer(twins.parameters(), options);
  Optimizer local_optimizer(twins.local, options);
  for (int step = 0; step < 20; ++step) {
    const auto x = torch::full({6}, 0.1 * step + 1, torch::kDouble);
    autograd::Context context;
    const auto loss = (twins.holders[0].rpc_async<&Holder::times>(x).get() *
                       twins.holders[1].rpc_async<&Holder::times>(x).get())
                          .sum();
    context.backward({loss});
    remote_optimizer.step(context);
    local_optimizer.zero_grad();
    ((twins.local[0] * x) * (twins.local[1] * x)).sum().backward();
    local_optimizer.step();
  }
  for (int i = 0; i < 2; ++i) {
    const auto there = twins.holders[static_cast<std::size_t>(i)].rpc_sync<&Holder::now>();
    EXPECT_TRUE(torch::allclose(there, twins.local[static_cast<std::size_t>(i)], 1e-12, 0))
        << there << twins.local[static_cast<std::size_t>(i)];
    EXPECT_FALSE(twins.holders[static_cast<std::size_t>(i)].rpc_sync<&Holder::has_grad>());
  }
}

TEST(DistributedOptimizer, SgdFollowsTheLocalOne) {
  using Options = torch::optim::SGDOptions;
  expect_same_trajectory<torch::optim::SGD>(Options(0.01).momentum(0.9));
  expect_same_trajectory<torch::optim::SGD>(
      Options(0.01).momentum(0.8).nesterov(true).weight_decay(0.1));
  expect_same_trajectory<torch::optim::SGD>(Options(0.01).momentum(0.8).dampening(0.5));
}
TEST(DistributedOptimizer, AdamFollowsTheLocalOne) {
  using Options = torch::optim::AdamOptions;
  expect_same_trajectory<torch::optim::Adam>(Options(0.05));
  expect_same_trajectory<torch::optim::Adam>(
      Options(0.05).betas({0.7, 0.9}).eps(1e-3).weight_decay(0.1).amsgrad(true));
}
TEST(DistributedOptimizer, AdamWFollowsTheLocalOne) {
  using Options = torch::optim::AdamWOptions;
  expect_same_trajectory<torch::optim::AdamW>(Options(0.05));
  expect_same_trajectory<torch::optim::AdamW>(
      Options(0.05).betas({0.7, 0.9}).eps(1e-3).weight_decay(0.3).amsgrad(true));
}
TEST(DistributedOptimizer, AdagradFollowsTheLocalOne) {
  using Options = torch::optim::AdagradOptions;
  expect_same_trajectory<torch::optim::Adagrad>(Options(0.05));
  expect_same_trajectory<torch::optim::Adagrad>(
      Options(0.05).lr_decay(0.1).weight_decay(0.1).initial_accumulator_value(0.5).eps(1e-3));
}
TEST(DistributedOptimizer, RmspropFollowsTheLocalOne) {
  using Options = torch::optim::RMSpropOptions;
  expect_same_trajectory<torch::optim::RMSprop>(Options(0.01));
  expect_same_trajectory<torch::optim::RMSprop>(
      Options(0.01).alpha(0.8).eps(1e-3).weight_decay(0.1).momentum(0.7).centered(true));
}
TEST(DistributedOptimizer, OneOfOnesOwnFollowsTheLocalOne) {
  expect_same_trajectory<SignDescent>(SignOptions(0.01));
}

TEST(DistributedOptimizer, OneWithoutARateHasNoSchedule) {
  Cluster cluster(3);
  const Twins twins;
  DistributedOptimizer<SignDescent> optimizer(twins.parameters(), SignOptions(0.01));
  for (const auto& refused : std::vector<std::function<void()>>{
           [&] { optimizer.set_schedule(stitch::optim::constant({})); },
           [&] { optimizer.set_lr(0.1); }}) {
    EXPECT_STREQ(
        error_of(refused).what(),
        "options of distributed_optimizer_test::SignDescent have no learning rate: override "
        "get_lr() and set_lr() of torch::optim::OptimizerOptions");
  }
}

TEST(DistributedOptimizer, LeavesParametersWithoutAGradientAlone) {
  Cluster cluster(3);
  Twins twins;
  DistributedOptimizer<torch::optim::Adam> optimizer(twins.parameters(),
                                                     torch::optim::AdamOptions(0.1));
  autograd::Context context;
  context.backward({twins.holders[0].rpc_async<&Holder::squared>().get().sum()});
  EXPECT_EQ(optimizer.step(context), 1);
  EXPECT_FALSE(torch::equal(twins.holders[0].rpc_sync<&Holder::now>(), initial(0)));
  EXPECT_TRUE(torch::equal(twins.holders[1].rpc_sync<&Holder::now>(), initial(1)));
}

TEST(DistributedOptimizer, AStepWithoutAnyGradientSaysSoOnce) {
  Cluster cluster(2);
  const auto holder = remote<Holder>("worker1", initial(0));
  DistributedOptimizer<torch::optim::SGD> optimizer({holder.rpc_sync<&Holder::parameter>()},
                                                    torch::optim::SGDOptions(0.1));
  stitch::optim::detail::said_no_gradient = false;
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 2; ++i) {
    const autograd::Context context;
    EXPECT_EQ(optimizer.step(context), 0);
  }
  const std::string text = ::testing::internal::GetCapturedStderr();
  const std::string said = "a step found no gradient for any of its parameters";
  EXPECT_TRUE(contains(text, said)) << text;
  EXPECT_EQ(text.find(said), text.rfind(said)) << text;
}

// Runs on a trainer: each step in a context of its own.
void subtract_one_each_step(RRef<Holder> holder, int steps) {
  DistributedOptimizer<SlowDescent> optimizer({holder.rpc_sync<&Holder::parameter>()},
                                              SignOptions());
  for (int step = 0; step < steps; ++step) {
    autograd::Context context;
    context.backward(
        {holder.rpc_async<&Holder::times>(torch::ones({4}, torch::kDouble)).get().sum()});
    optimizer.step(context);
  }
}

TEST(DistributedOptimizer, StepsOfManyContextsAddUpExactly) {
  Cluster cluster(3);
  const auto holder = remote<Holder>("worker1", torch::zeros({4}, torch::kDouble));
  std::vector<Future<void>> trainers;
  for (std::uint32_t t = 0; t < 4; ++t)
    trainers.push_back(rpc_async<subtract_one_each_step>(WorkerId(t % 3), holder, 15));
  when_all(std::move(trainers)).get();
  EXPECT_TRUE(
      torch::equal(holder.rpc_sync<&Holder::now>(), torch::full({4}, -60.0, torch::kDouble)));
}

// A forward pass under one context, a step of another, and backward over the first: the gradient
// that this finds, or the error.
template <class Optimizer, class Options>
at::Tensor gradient_after_a_step(const Options& options, stitch::optim::StalePolicy policy,
                                 at::Tensor& stepped) {
  const auto holder = remote<Holder>("worker1", initial(0));
  DistributedOptimizer<Optimizer> optimizer({holder.rpc_sync<&Holder::parameter>()}, options,
                                            policy);
  const auto x = torch::ones_like(initial(0)).requires_grad_();
  autograd::Context first;
  const auto loss = holder.rpc_async<&Holder::times>(x).get().sum();
  {
    autograd::Context second;
    second.backward({holder.rpc_async<&Holder::squared>().get().sum()});
    EXPECT_EQ(optimizer.step(second), 1);
  }
  stepped = holder.rpc_sync<&Holder::now>();
  first.backward({loss});
  return first.gradient(x);  // the parameter that backward has seen
}
template <class Optimizer, class Options>
void expect_that_a_step_is_detected_unless_allowed(const Options& options) {
  SCOPED_TRACE(stitch::optim::optimizer_name<Optimizer>());
  at::Tensor stepped;
  const auto error = error_of([&] {
    static_cast<void>(
        gradient_after_a_step<Optimizer>(options, stitch::optim::StalePolicy::detect, stepped));
  });
  const std::string text = error.what();
  EXPECT_TRUE(contains(text, "modified by an inplace operation")) << text;
  EXPECT_TRUE(contains(text,
                       "An optimizer stepped it between forward and backward; StalePolicy::allow "
                       "permits that, or return a copy"))
      << text;
  EXPECT_FALSE(contains(text, "anomaly")) << text;
  const auto seen =
      gradient_after_a_step<Optimizer>(options, stitch::optim::StalePolicy::allow, stepped);
  EXPECT_TRUE(torch::equal(seen, stepped)) << "backward uses the new values";
  EXPECT_FALSE(torch::equal(stepped, initial(0)));
}

TEST(DistributedOptimizer, AStepBetweenForwardAndBackwardIsDetectedUnlessAllowed) {
  Cluster cluster(2);
  namespace optim = stitch::optim;
  expect_that_a_step_is_detected_unless_allowed<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
  expect_that_a_step_is_detected_unless_allowed<torch::optim::SGD>(
      torch::optim::SGDOptions(0.1).momentum(0.9));
  expect_that_a_step_is_detected_unless_allowed<torch::optim::Adam>(torch::optim::AdamOptions(0.1));
  expect_that_a_step_is_detected_unless_allowed<torch::optim::AdamW>(
      torch::optim::AdamWOptions(0.1));
  expect_that_a_step_is_detected_unless_allowed<torch::optim::Adagrad>(
      torch::optim::AdagradOptions(0.1));
  expect_that_a_step_is_detected_unless_allowed<torch::optim::RMSprop>(
      torch::optim::RMSpropOptions(0.1));
  expect_that_a_step_is_detected_unless_allowed<optim::SparseSGD>(optim::SparseSGDOptions(0.1));
  expect_that_a_step_is_detected_unless_allowed<optim::SparseAdagrad>(
      optim::SparseAdagradOptions(0.1));
  expect_that_a_step_is_detected_unless_allowed<optim::SparseAdam>(optim::SparseAdamOptions(0.1));
  expect_that_a_step_is_detected_unless_allowed<SignDescent>(SignOptions(0.1));
}

// One tensor under two names.
struct Tied : torch::nn::Module {
  Tied() {
    down = register_parameter("down", torch::full({2, 2}, 2.0));
    bias = register_parameter("bias", torch::zeros({2}));
    up = register_parameter("up", down);
  }
  at::Tensor forward(at::Tensor x) { return x.mm(down).mm(up.t()) + bias; }
  at::Tensor down, bias, up;
};

TEST(DistributedOptimizer, StepsTiedWeightsOnce) {
  Cluster cluster(2);
  const stitch::RemoteModule<Tied> tied("worker1");
  const std::vector<std::string> names{"down", "bias"};
  EXPECT_EQ(tied.parameter_names(), names);
  EXPECT_EQ(tied.parameters().size(), 2u);
  EXPECT_EQ(tied.named_parameters().at(0).first, "down");
  DistributedOptimizer<torch::optim::SGD> optimizer(tied.named_parameters(),
                                                    torch::optim::SGDOptions(0.1));
  Tied local;
  const auto x = torch::ones({1, 2});
  const auto expected = torch::autograd::grad({local.forward(x).sum()}, {local.down})[0];
  autograd::Context context;
  context.backward({tied.forward(x).sum()});
  EXPECT_EQ(optimizer.step(context), 2);
  const auto state = tied.state_dict();
  EXPECT_TRUE(torch::allclose(state.at("down"), local.down.detach() - 0.1 * expected));
  EXPECT_TRUE(torch::equal(state.at("up"), state.at("down")));
}

TEST(DistributedOptimizer, RefusesWhatItCannotStep) {
  Cluster cluster(2);
  Error error = error_of(
      [] { DistributedOptimizer<torch::optim::SGD> optimizer({}, torch::optim::SGDOptions(0.1)); });
  EXPECT_STREQ(error.what(), "optimizer has no parameters to step");
  const auto leaf = torch::ones(2).set_requires_grad(true);
  const auto computed = make_rref(leaf * 2);
  error = error_of([&] {
    DistributedOptimizer<torch::optim::SGD> optimizer({computed}, torch::optim::SGDOptions(0.1));
  });
  EXPECT_TRUE(contains(error.what(), "is not a parameter: it must be a leaf tensor"))
      << error.what();
  const auto good = stitch::make_rref(torch::ones(2).set_requires_grad(true));
  using stitch::optim::NamedParameter;
  const auto other = make_rref(torch::ones(2).set_requires_grad(true));
  error = error_of([&] {
    DistributedOptimizer<torch::optim::SGD> optimizer(
        std::vector<NamedParameter>{{"w", good}, {"w", other}}, torch::optim::SGDOptions(0.1));
  });
  EXPECT_STREQ(error.what(), "optimizer was given two parameters named \"w\"");
  error = error_of([&] {
    DistributedOptimizer<torch::optim::LBFGS> optimizer({good}, torch::optim::LBFGSOptions(0.1));
  });
  EXPECT_TRUE(contains(error.what(), "LBFGS re-evaluates the loss")) << error.what();
}

TEST(DistributedOptimizer, ChangesItsOptions) {
  Cluster cluster(2);
  const auto holder = remote<Holder>("worker1", torch::zeros({2}, torch::kDouble));
  DistributedOptimizer<torch::optim::SGD> optimizer({holder.rpc_sync<&Holder::parameter>()},
                                                    torch::optim::SGDOptions(1.0));
  const auto step = [&] {
    autograd::Context context;
    context.backward(
        {holder.rpc_async<&Holder::times>(torch::ones({2}, torch::kDouble)).get().sum()});
    optimizer.step(context);
  };
  step();
  optimizer.set_options(torch::optim::SGDOptions(10.0));
  step();
  EXPECT_TRUE(
      torch::equal(holder.rpc_sync<&Holder::now>(), torch::full({2}, -11.0, torch::kDouble)));
}

// As torch::optim's own do.
TEST(DistributedOptimizer, LeavesFrozenParametersAloneUntilTheyAreNot) {
  Cluster cluster(2);
  auto frozen = initial(0);
  const auto moving = initial(1).set_requires_grad(true);
  DistributedOptimizer<torch::optim::SGD> optimizer(
      {make_rref(frozen), make_rref(moving), make_rref(torch::arange(6))},
      torch::optim::SGDOptions(1.0));
  const auto step = [&] {
    autograd::Context context;
    context.backward({(frozen * moving).sum()});
    return optimizer.step(context);
  };
  EXPECT_EQ(step(), 1);
  EXPECT_TRUE(torch::equal(frozen, initial(0)));
  EXPECT_TRUE(torch::allclose(moving.detach(), initial(1) - initial(0), 1e-12));
  frozen.set_requires_grad(true);
  EXPECT_EQ(step(), 2);
  EXPECT_TRUE(torch::allclose(frozen.detach(), initial(0) - (initial(1) - initial(0)), 1e-12));
}

TEST(DistributedOptimizer, StepsNothingWhenAGradientDoesNotFit) {
  Cluster cluster(1);
  auto good = initial(0).set_requires_grad(true);
  auto bad = initial(1).set_requires_grad(true);
  DistributedOptimizer<torch::optim::SGD> optimizer({make_rref(good), make_rref(bad)},
                                                    torch::optim::SGDOptions(1.0));
  autograd::Context context;
  context.backward({(good * bad).sum()});
  bad.set_data(torch::ones({2}, torch::kDouble));
  const auto error = error_of([&] { optimizer.step(context); });
  EXPECT_TRUE(
      contains(error.what(), "gradient of shape [6] does not fit parameter \"1\" of shape [2]"))
      << error.what();
  EXPECT_TRUE(torch::equal(good.detach(), initial(0)));
}

// One row of a table, looked up by index: its gradient is sparse.
class Table {
 public:
  Table() : rows_(initial(0).reshape({3, 2}).clone().set_requires_grad(true)) {}
  RRef<at::Tensor> parameter() { return make_rref(rows_); }
  at::Tensor look_up(const at::Tensor& ids) {
    return at::embedding(rows_, ids, -1, /*scale_grad_by_freq=*/false, /*sparse=*/true);
  }
  at::Tensor now() { return rows_.detach().clone(); }

 private:
  at::Tensor rows_;
};

template <class Optimizer>
void expect_same_sparse_trajectory(const stitch::optim::OptionsOf<Optimizer>& options) {
  Cluster cluster(2);
  const auto table = remote<Table>("worker1");
  Table local_table;
  DistributedOptimizer<Optimizer> optimizer({table.rpc_sync<&Table::parameter>()}, options);
  const auto local_rows = local_table.parameter().local_value();
  Optimizer local_optimizer(std::vector<at::Tensor>{local_rows}, options);
  for (int step = 0; step < 4; ++step) {
    const auto ids = torch::tensor({0, 2, 2, step % 3});
    autograd::Context context;
    context.backward({table.rpc_async<&Table::look_up>(ids).get().pow(2).sum()});
    EXPECT_EQ(optimizer.step(context), 1);
    local_optimizer.zero_grad();
    local_table.look_up(ids).pow(2).sum().backward();
    ASSERT_TRUE(local_rows.grad().is_sparse());
    local_optimizer.step();
  }
  EXPECT_TRUE(torch::allclose(table.rpc_sync<&Table::now>(), local_table.now(), 1e-12, 0));
}

TEST(DistributedOptimizer, StepsSparseGradientsAsTheLocalOne) {
  expect_same_sparse_trajectory<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
  expect_same_sparse_trajectory<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.1));
}

TEST(DistributedOptimizer, PassesOnWhyAStepIsRefusedAndCountsTheOthers) {
  Cluster cluster(3);
  const std::vector<RRef<Table>> tables{remote<Table>("worker1"), remote<Table>("worker2")};
  DistributedOptimizer<torch::optim::Adam> optimizer(
      {tables[0].rpc_sync<&Table::parameter>(), tables[1].rpc_sync<&Table::parameter>()},
      torch::optim::AdamOptions(0.1));
  autograd::Context context;
  const auto ids = torch::tensor({0, 2});
  context.backward({(tables[0].rpc_async<&Table::look_up>(ids).get() *
                     tables[1].rpc_async<&Table::look_up>(ids).get())
                        .sum()});
  const auto error = error_of([&] { optimizer.step(context); });
  EXPECT_TRUE(
      has_text(error, ErrorCode::remote_exception, "Adam does not support sparse gradients"));
  EXPECT_TRUE(contains(error.what(), "1 other")) << error.what();
}

TEST(DistributedOptimizer, RefusesContextsThatHaveEndedOrFailed) {
  Cluster cluster(2);
  const auto holder = remote<Holder>("worker1", initial(0));
  DistributedOptimizer<torch::optim::SGD> optimizer({holder.rpc_sync<&Holder::parameter>()},
                                                    torch::optim::SGDOptions(0.1));
  std::optional<autograd::ContextHandle> handle;
  {
    autograd::Context context;
    handle = context;
    context.backward({holder.rpc_async<&Holder::squared>().get().sum()});
  }
  EXPECT_EQ(error_of([&] { optimizer.step(*handle); }).code(), ErrorCode::cancelled);
  EXPECT_TRUE(torch::equal(holder.rpc_sync<&Holder::now>(), initial(0)));

  autograd::Context failed;
  const auto value = holder.rpc_async<&Holder::squared>().get();
  value.register_hook(
      [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("this hook always fails"); });
  EXPECT_TRUE(contains(std::string(error_of([&] { failed.backward({value.sum()}); }).what()),
                       "this hook always fails"));
  EXPECT_TRUE(contains(std::string(error_of([&] { optimizer.step(failed); }).what()),
                       "this hook always fails"));
  EXPECT_TRUE(torch::equal(holder.rpc_sync<&Holder::now>(), initial(0)));
}

}  // namespace
}  // namespace distributed_optimizer_test
