// backward_and_step() beside backward() and step(): the same parameters to the last bit, and no
// parameter changed by a pass that fails.
#include "stitch/dist_autograd/protocol/messages.h"
#include "stitch/dist_optim/step_plan.h"
#include "tests/support/world_test.h"

namespace backward_and_step_test {
namespace {

namespace autograd = stitch::dist_autograd;
using namespace stitch::testing;
using stitch::optim::backward_and_step;
using stitch::optim::backward_and_step_async;
using stitch::optim::DistributedOptimizer;
using stitch::optim::StalePolicy;
using stitch::optim::StepPlan;

at::Tensor initial(int which) {
  return torch::linspace(0.5 + which, 2.0 + which, 6, torch::kDouble);
}

Gate gate;

// A dense and a sparse parameter on one worker, and what is computed from them.
class Layer {
 public:
  explicit Layer(int which)
      : weight_(initial(which).set_requires_grad(true)),
        rows_(initial(which + 2).reshape({3, 2}).set_requires_grad(true)) {}
  std::vector<RRef<at::Tensor>> weight() { return {make_rref(weight_)}; }
  std::vector<RRef<at::Tensor>> rows() { return {make_rref(rows_)}; }
  at::Tensor times(const at::Tensor& x) { return weight_ * x; }
  at::Tensor look_up(const at::Tensor& ids) {
    return at::embedding(rows_, ids, -1, /*scale_grad_by_freq=*/false, /*sparse=*/true);
  }
  // A function whose backward throws.
  at::Tensor fails_in_backward(const at::Tensor& x) {
    at::Tensor y = weight_ * x;
    y.register_hook([](const at::Tensor&) -> at::Tensor {
      throw std::runtime_error("this hook always fails");
    });
    return y * 2;
  }
  // One whose backward waits for the gate.
  at::Tensor waits_in_backward(const at::Tensor& x) {
    at::Tensor y = weight_ * x;
    y.register_hook([](const at::Tensor& gradient) {
      gate.pass();
      return gradient;
    });
    return y * 2;
  }
  std::vector<at::Tensor> now() { return {weight_.detach().clone(), rows_.detach().clone()}; }

 private:
  at::Tensor weight_, rows_;
};

using Adam = torch::optim::Adam;
using Adagrad = torch::optim::Adagrad;
using SGD = torch::optim::SGD;

// Layers on workers 1 and 2, Adam for the dense parameters and Adagrad for the sparse ones.
struct Model {
  std::vector<RRef<Layer>> layers{remote<Layer>("worker1", 0), remote<Layer>("worker2", 1)};
  at::Tensor own = initial(5).set_requires_grad(true);
  DistributedOptimizer<Adam> dense;
  DistributedOptimizer<Adagrad> sparse;

  explicit Model(StalePolicy policy = StalePolicy::detect)
      : dense(references<&Layer::weight>({make_rref(own)}), torch::optim::AdamOptions(0.05),
              policy),
        sparse(references<&Layer::rows>({}), torch::optim::AdagradOptions(0.1), policy) {}
  template <auto Get>
  std::vector<RRef<at::Tensor>> references(std::vector<RRef<at::Tensor>> all) {
    for (const auto& layer : layers) all.push_back(layer.rpc_sync<Get>().front());
    return all;
  }
  // Ends on both layers and comes back to the first one.
  at::Tensor loss(int step) {
    const auto x = torch::full({6}, 0.1 * step + 1, torch::kDouble);
    const auto ids = torch::tensor({0, 2, step % 3});
    const auto first = layers[0].rpc_async<&Layer::times>(x * own).get();
    const auto second = layers[1].rpc_async<&Layer::times>(first).get();
    const auto third = layers[0].rpc_async<&Layer::times>(second).get();
    return third.sum() + layers[0].rpc_async<&Layer::look_up>(ids).get().pow(2).sum() +
           layers[1].rpc_async<&Layer::look_up>(ids).get().pow(2).sum();
  }
  // All parameters, one behind the other.
  at::Tensor now() {
    std::vector<at::Tensor> all{own.detach().clone()};
    for (const auto& layer : layers) {
      for (const auto& each : layer.rpc_sync<&Layer::now>()) all.push_back(each.flatten());
    }
    return at::cat(all);
  }
};

void expect_equal_steps(
    const autograd::Options& options,
    const std::function<std::int64_t(Model&, const autograd::Context&, at::Tensor)>& step) {
  Model together, apart;
  for (int i = 0; i < 6; ++i) {
    std::int64_t stepped = 0;
    {
      autograd::Context context;
      stepped = step(together, context, together.loss(i));
    }
    autograd::Context context;
    context.backward({apart.loss(i)}, options);
    EXPECT_EQ(stepped, apart.dense.step(context) + apart.sparse.step(context));
    ASSERT_TRUE(torch::equal(together.now(), apart.now())) << "step " << i;
  }
}

TEST(BackwardAndStep, EqualsTheTwoCallsToTheLastBit) {
  Cluster cluster(3);
  expect_equal_steps({}, [&](Model& model, const autograd::Context& context, at::Tensor loss) {
    return backward_and_step(context, {std::move(loss)}, model.dense, model.sparse);
  });
}

TEST(BackwardAndStep, EqualsThemWithoutWaitingToo) {
  Cluster cluster(3);
  expect_equal_steps({}, [](Model& model, const autograd::Context& context, at::Tensor loss) {
    return backward_and_step_async(context, {std::move(loss)}, model.dense, model.sparse).get();
  });
}

TEST(BackwardAndStep, FollowsThePassWhenResultsAreUnused) {
  Cluster cluster(3);
  expect_equal_steps({}, [](Model& model, const autograd::Context& context, at::Tensor loss) {
    const auto unused = model.layers[1].rpc_async<&Layer::times>(initial(0)).get();
    return backward_and_step(context, {std::move(loss)}, model.dense, model.sparse);
  });
}

TEST(BackwardAndStep, StepsNothingWhenThePassFails) {
  Cluster cluster(3);
  Model model;
  const auto before = model.now();
  for (const int failing : {0, 1}) {
    autograd::Context context;
    const auto x = torch::ones({6}, torch::kDouble);
    const auto bad = model.layers[static_cast<std::size_t>(failing)]
                         .rpc_async<&Layer::fails_in_backward>(x)
                         .get();
    const auto loss = model.loss(1) + bad.sum();
    const auto error =
        error_of([&] { backward_and_step(context, {loss}, model.dense, model.sparse); });
    EXPECT_TRUE(contains(error.what(), "this hook always fails")) << error.what();
    EXPECT_FALSE(contains(error.what(), "had stepped")) << error.what();
    EXPECT_TRUE(torch::equal(model.now(), before));
    EXPECT_TRUE(contains(std::string(error_of([&] { model.dense.step(context); }).what()),
                         "this hook always fails"));
  }
  autograd::Context context;
  EXPECT_EQ(error_of([&] { backward_and_step(context, {}, model.dense); }).code(),
            ErrorCode::invalid_argument);
  EXPECT_TRUE(torch::equal(model.now(), before));
}

// A hook on one worker fails only behind a result that the loss does not use: when the other worker
// has long been complete.
TEST(BackwardAndStep, StepsNothingWhenThePassFailsBehindAnUnusedResult) {
  Cluster cluster(3);
  Model model;
  const auto before = model.now();
  autograd::Context context;
  const auto x = torch::ones({6}, torch::kDouble);
  const auto shared = model.layers[1].rpc_async<&Layer::fails_in_backward>(x).get();
  // The gradient of `shared` waits for this one, which no loss uses.
  const auto unused = model.layers[0].rpc_async<&Layer::times>(shared).get();
  const auto loss = model.loss(1) + shared.sum();
  const auto error = error_of([&] { backward_and_step(context, {loss}, model.dense); });
  EXPECT_TRUE(contains(error.what(), "this hook always fails")) << error.what();
  EXPECT_TRUE(torch::equal(model.now(), before));
}

TEST(BackwardAndStep, PassesOnWhyAnOwnerRefusesToStep) {
  Cluster cluster(3);
  Model model;
  DistributedOptimizer<Adam> wrong(model.references<&Layer::rows>({}),
                                   torch::optim::AdamOptions(0.1));
  const auto before = model.layers[0].rpc_sync<&Layer::now>();
  autograd::Context context;
  const auto loss = model.loss(1);
  const auto error = error_of([&] { backward_and_step(context, {loss}, wrong, model.dense); });
  EXPECT_TRUE(
      has_text(error, ErrorCode::remote_exception, "Adam does not support sparse gradients"));
  EXPECT_TRUE(contains(error.what(), "1 other")) << error.what();
  const auto after = model.layers[0].rpc_sync<&Layer::now>();
  EXPECT_TRUE(torch::equal(after[1], before[1]));
  EXPECT_FALSE(torch::equal(after[0], before[0])) << "the others have stepped";
}

// Two parts that end (the second one when `slow` is completed), one that cannot begin, and one that
// must not.
StepPlan plan_with_one_that_cannot_begin(const Promise<std::int64_t>& slow) {
  using Timeout = StepPlan::Timeout;
  StepPlan plan;
  plan.parts = {{"ps0", [](double, Timeout) { return make_ready(std::int64_t{1}); }},
                {"ps1", [slow](double, Timeout) { return slow.future(); }},
                {"ps2",
                 [](double, Timeout) -> Future<std::int64_t> {
                   throw Error(ErrorCode::overloaded, "this owner cannot be asked");
                 }},
                {"ps3", [](double, Timeout) {
                   ADD_FAILURE() << "a step behind one that could not begin";
                   return make_ready(std::int64_t{1});
                 }}};
  return plan;
}

TEST(BackwardAndStep, WaitsForStepsThatHaveBegunWhenAnotherCannotBegin) {
  Cluster cluster(3);
  Model model;
  const std::string expected = "this owner cannot be asked; ps0 and ps1 had stepped";
  // Steps begin when the pass is settled, or, with a result that is not used, when it has ended.
  for (const bool unused : {false, true}) {
    for (const bool waits : {false, true}) {
      autograd::Context context;
      const auto loss = model.loss(1);
      if (unused) model.layers[1].rpc_async<&Layer::times>(initial(0)).get();
      const Promise<std::int64_t> slow;
      if (waits) slow.set_value(2);
      const auto plan = plan_with_one_that_cannot_begin(slow);
      const auto error = error_of([&] {
        if (waits) {
          stitch::optim::backward_and_step(context, {loss}, {}, plan, {});
          return;
        }
        auto stepping = stitch::optim::backward_and_step_async(context, {loss}, {}, plan, {});
        EXPECT_FALSE(stepping.wait_for(std::chrono::milliseconds(100))) << "one has not ended";
        slow.set_value(2);
        stepping.get();
      });
      EXPECT_EQ(error.code(), ErrorCode::overloaded) << error.what();
      EXPECT_EQ(error.what(), expected);
    }
  }
}

TEST(StartSteps, WaitForThoseThatHaveBegunWhenAnotherCannotBegin) {
  const Promise<std::int64_t> slow;
  auto step = stitch::optim::start_step(plan_with_one_that_cannot_begin(slow), {});
  EXPECT_FALSE(step.ready());
  slow.set_error(Error(ErrorCode::disconnected, "this owner is gone"));
  const auto error = error_of([&] { static_cast<void>(step.get().get()); });
  EXPECT_EQ(error.code(), ErrorCode::overloaded);
  EXPECT_STREQ(error.what(), "this owner cannot be asked; ps0 had stepped; ps1 has not answered");
}

// The pass is held in a hook of one worker until the next forward has ended: if that waited for the
// pass, the gate would not be opened in time. All other gradients may be complete by then, and yet
// no owner steps: a pass that fails must change nothing.
TEST(BackwardAndStep, LetsTheNextForwardBeginMeanwhileWhereStaleParametersAreAllowed) {
  Cluster cluster(3);
  Model model(StalePolicy::allow);
  for (int i = 0; i < 3; ++i) {
    gate.close();
    autograd::Context first, second;
    const at::Tensor before = model.now();
    at::Tensor loss, next;
    {
      const auto in = autograd::context_scope(first.id());
      const auto x = torch::ones({6}, torch::kDouble);
      loss = model.loss(i) + model.layers[1].rpc_async<&Layer::waits_in_backward>(x).get().sum();
    }
    auto stepping = backward_and_step_async(first, {loss}, model.dense, model.sparse);
    EXPECT_TRUE(gate.wait_for_arrival());
    {
      const auto in = autograd::context_scope(second.id());
      next = model.loss(i + 1);
    }
    EXPECT_TRUE(torch::equal(model.now(), before)) << "a step before all gradients are complete";
    EXPECT_FALSE(stepping.ready());
    gate.open();
    EXPECT_EQ(stepping.get(), 5);
    EXPECT_FALSE(torch::equal(model.now(), before));
    EXPECT_EQ(backward_and_step(second, {next}, model.dense, model.sparse), 5);
  }
}

// The message that ends a worker's part of the pass comes too late: by then it has stepped.
TEST(BackwardAndStepFaults, StepsBeforeThePassHasEndedAndSaysSoWhenThatFails) {
  Cluster cluster(3);
  Model model;
  for (const bool waits : {true, false}) {
    const auto before = model.now();
    autograd::Context context;
    const auto loss = model.loss(1);
    Error error(ErrorCode::internal, "");
    {
      const LoopbackFaults delay_done([](std::uint32_t, std::uint32_t, std::uint64_t,
                                         const stitch::transport::Message& message) {
        const bool done = kind_of(message) == autograd::wire::kDone;
        return stitch::transport::Fate{.delay = std::chrono::seconds(done ? 2 : 0)};
      });
      const autograd::Options options{.timeout = std::chrono::seconds(1)};
      error = error_of([&] {
        if (waits) {
          backward_and_step(context, {loss}, options, model.dense);
        } else {
          backward_and_step_async(context, {loss}, options, model.dense).get();
        }
      });
    }
    EXPECT_TRUE(has_text(error, ErrorCode::timeout, "; worker0, worker1 and worker2 had stepped"));
    EXPECT_FALSE(torch::equal(model.now(), before));
  }
}

}  // namespace
}  // namespace backward_and_step_test
