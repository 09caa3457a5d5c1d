#include <semaphore>

#include "tests/dist_autograd/remote_parts.h"
#include "tests/support/oracle.h"
#include "tests/support/world_test.h"

namespace stitch::testing::backward_test {
namespace {

using dist_autograd::Context;
using namespace std::chrono_literals;

TEST(Backward, ReachesParametersOnEveryWorkerAndLeavesGradAlone) {
  Cluster cluster(3);
  Context context;
  const auto x = ones().requires_grad_();
  const auto loss =
      rpc_sync<via>("worker1", std::vector<std::string>{"worker2", "worker1"}, x * 2).sum();
  context.backward({loss});
  const auto p = parameter_of(cluster[1]).detach(), q = parameter_of(cluster[2]).detach();
  EXPECT_TRUE(equal_gradients(context.gradients().at(x), 2 * p * p * q));
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[1], context.id()), 4 * p * q));
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[2], context.id()), 2 * p * p));
  EXPECT_FALSE(x.grad().defined());
  EXPECT_FALSE(parameter_of(cluster[1]).grad().defined());
}

// Where the pass ends, grad mode is off.
TEST(Backward, CompletesItsFutureWithGradientsSwitchedOn) {
  Cluster cluster(1);
  Context context;
  std::binary_semaphore go{0}, said{0};
  std::atomic<bool> enabled{false};
  const auto x = ones().requires_grad_();
  const auto y = x * 2;
  y.register_hook([&go](at::Tensor gradient) {
    go.acquire();
    return gradient;
  });
  const auto future = context.backward_async({y.sum()});
  future.on_ready([&] {
    enabled = at::GradMode::is_enabled();
    said.release();
  });
  go.release();
  said.acquire();
  EXPECT_TRUE(enabled);
}

TEST(Backward, WorksWithCallsToItself) {
  Cluster cluster(1);
  Context context;
  const auto x = ones().requires_grad_();
  context.backward({rpc_sync<via>("worker0", std::vector<std::string>{"worker0"}, x).sum()});
  const auto p = parameter_of(cluster[0]).detach();
  EXPECT_TRUE(equal_gradients(context.gradient(x), p * p));
}

Gate node_gate;
at::Tensor behind_the_gate(at::Tensor x) {
  const auto y = times_parameter(x);
  y.register_hook([](const at::Tensor& gradient) {
    node_gate.pass();
    return gradient;
  });
  return y;
}
at::Tensor behind_the_gate_via(std::string next, at::Tensor x) {
  return rpc_sync<behind_the_gate>(next, times_parameter(x));
}

TEST(Backward, IsCountedOnEveryWorkerThatTakesPartWhileItRuns) {
  Cluster cluster(4);
  node_gate.close();
  {
    Context context;
    const auto loss =
        rpc_sync<behind_the_gate_via>("worker1", "worker2", ones().requires_grad_()).sum();
    const auto future = context.backward_async({loss});
    ASSERT_TRUE(node_gate.wait_for_arrival());
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(count_on(cluster[i], "passes"), 1) << i;
      EXPECT_EQ(count_on(cluster[i], "contexts"), 1) << i;
    }
    EXPECT_EQ(count_on(cluster[3], "passes") + count_on(cluster[3], "contexts"), 0);
    node_gate.open();
    future.get();
    EXPECT_TRUE(eventually([&] {
      return count_on(cluster[0], "passes") + count_on(cluster[1], "passes") +
                 count_on(cluster[2], "passes") ==
             0;
    }));
  }
  EXPECT_TRUE(nothing_is_left(cluster));
}

TEST(Backward, TakesSeveralRootsWithGradientsOfTheirOwn) {
  Cluster cluster(2);
  Context context;
  const auto a = rpc_sync<times_parameter>("worker1", ones()),
             b = rpc_sync<times_parameter>("worker1", 2 * ones());
  dist_autograd::Options with;
  with.grads = {10 * ones(), 100 * ones()};
  context.backward({a, b}, with);
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[1], context.id()), 210 * ones()));
}

TEST(Backward, CannotBeRepeatedWithoutRetainGraph) {
  Cluster cluster(2);
  Context context;
  const auto loss = rpc_sync<times_parameter>("worker1", ones().requires_grad_()).sum();
  context.backward({loss});
  const Error error = stitch::testing::error_of([&] { context.backward({loss}); });
  EXPECT_EQ(error.worker(), "worker1");
  EXPECT_TRUE(error.remote());
  EXPECT_NE(std::string(error.what()).find("second time"), std::string::npos) << error.what();
}

TEST(Backward, RefusesRootsThatMakeNoSense) {
  Cluster cluster(1);
  Context context;
  const auto text_of = [&](std::vector<at::Tensor> roots,
                           std::vector<at::Tensor> grads = {}) -> std::string {
    try {
      dist_autograd::Options with;
      with.grads = std::move(grads);
      context.backward(std::move(roots), with);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return error.what();
    }
    return "nothing was thrown";
  };
  const auto x = ones().requires_grad_();
  EXPECT_EQ(text_of({}), "backward needs at least one root tensor");
  EXPECT_EQ(text_of({at::Tensor()}), "root 0 is undefined");
  EXPECT_EQ(text_of({x.sum(), ones().sum()}), "root 1 does not require grad and has no grad_fn");
  EXPECT_EQ(text_of({x * 2}),
            "root 0 has shape [3]: only a root of one element may leave its gradient out");
  EXPECT_EQ(text_of({x * 2}, {at::ones({2}, at::kDouble)}),
            "root 0 has shape [3], its gradient [2]");
  EXPECT_EQ(text_of({x * 2}, {at::ones({3}, at::kFloat)}),
            "root 0 has dtype Double, its gradient Float");
  EXPECT_EQ(text_of({x.sum()}, {at::Tensor(), at::Tensor()}),
            "backward got 2 gradients for 1 roots");
}

double remote_backward(at::Tensor x) {
  const auto loss = rpc_sync<times_parameter>("worker2", x * own_parameter()).sum();
  dist_autograd::current_context().backward({loss});
  return loss.item<double>();
}

TEST(BackwardInHandlers, MayStartOnAnyWorkerOfTheContext) {
  Cluster cluster(3, {.num_threads = 1});
  Context context;
  const auto x = ones().requires_grad_();
  rpc_sync<remote_backward>("worker1", x * 3);
  const auto p = parameter_of(cluster[1]).detach(), q = parameter_of(cluster[2]).detach();
  EXPECT_TRUE(equal_gradients(context.gradient(x), 3 * p * q));
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[2], context.id()), 3 * p));
}

at::Tensor sum_via(std::string next, at::Tensor x) {
  return rpc_sync<times_parameter>(next, x * own_parameter()).sum();
}

TEST(BackwardFromRRef, StartsOnTheWorkerThatOwnsTheLoss) {
  Cluster cluster(3, {.num_threads = 1});
  Context context;
  const auto x = ones().requires_grad_();
  const auto loss = remote<sum_via>("worker1", "worker2", x * 3);
  loss.backward(context);
  const auto p = parameter_of(cluster[1]).detach(), q = parameter_of(cluster[2]).detach();
  EXPECT_TRUE(equal_gradients(context.gradient(x), 3 * p * q));
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[2], context.id()), 3 * p));
}

TEST(BackwardFromRRef, WorksOnAnOwnTensorAndOnOneThatWasFetched) {
  Cluster cluster(2);
  Context context;
  const auto x = ones().requires_grad_();
  const auto there = remote<times_parameter>("worker1", x);
  make_rref(there.to_here().sum()).backward(context);
  EXPECT_TRUE(equal_gradients(context.gradient(x), parameter_of(cluster[1]).detach()));
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[1], context.id()), ones()));
}

TEST(BackwardFromRRef, ThrowsTheErrorOfThePass) {
  Cluster cluster(2);
  Context context;
  const auto many = remote<times_parameter>("worker1", ones());
  const Error error = stitch::testing::error_of([&] { many.backward(context); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_STREQ(error.what(),
               "root 0 has shape [3]: only a root of one element may leave its gradient out");
}

TEST(ExactMode, LeavesDroppedResultsAlone) {
  Cluster cluster(4);
  Context context;
  const auto x = ones().requires_grad_();
  const auto used = rpc_sync<times_parameter>("worker1", x);
  const auto dropped =
      rpc_sync<via>("worker2", std::vector<std::string>{"worker3", "worker1"}, x * 7);
  rpc_sync<times_parameter>("worker1", x);
  context.backward({used.sum()});
  EXPECT_TRUE(equal_gradients(context.gradient(x), parameter_of(cluster[1]).detach()));
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[1], context.id()), ones()));
  EXPECT_FALSE(gradient_on(cluster[2], context.id()).defined());
  EXPECT_EQ(count_on(cluster[0], "gradient_links_sent"), 1);
  EXPECT_EQ(count_on(cluster[2], "gradient_links_sent"), 0);
  EXPECT_EQ(count_on(cluster[3], "gradient_links_sent"), 0);
  context.backward({dropped.sum()});
  EXPECT_TRUE(gradient_on(cluster[2], context.id()).defined());
}

at::Tensor cube_times_parameter(at::Tensor x) { return x.pow(3) * own_parameter(); }

TEST(CreateGraph, LeavesNothingBehindWhenTheContextEnds) {
  Cluster cluster(2);
  {
    Context context;
    const auto x = ones().requires_grad_();
    context.backward({rpc_sync<cube_times_parameter>("worker1", x * x).sum()},
                     {.create_graph = true});
    EXPECT_GT(count_on(cluster[1], "links"), 1);
  }
  EXPECT_TRUE(nothing_is_left(cluster));
}

TEST(Backward, GradientsThatAreHandedOutMayBeChanged) {
  Cluster cluster(1);
  const auto x = ones().requires_grad_();
  Context context;
  context.backward({(x * 3).sum()});
  context.gradients().at(x).zero_();
  context.gradient(x).zero_();
  EXPECT_TRUE(equal_gradients(context.gradient(x), 3 * ones()));
}

TEST(ConcurrentContexts, KeepTheirGradientsApartUnderLoad) {
  constexpr int kThreads = 6, kRounds = 20;
  Cluster cluster(3, {.num_threads = 3});
  const auto p = parameter_of(cluster[1]).detach();
  std::atomic<int> wrong{0};
  testing::on_each(kThreads, [&](int t) {
    const WorkerScope scope(cluster[t % 3]);
    for (int i = 1; i <= kRounds; ++i) {
      Context context;
      const auto loss =
          rpc_sync<via>("worker1", std::vector<std::string>{"worker2"}, ones() * (t + i)).sum();
      context.backward({loss});
      if (!equal_gradients(gradient_on(cluster[2], context.id()), p * (t + i))) ++wrong;
    }
  });
  EXPECT_EQ(wrong, 0);
  EXPECT_TRUE(nothing_is_left(cluster));
}

}  // namespace
}  // namespace stitch::testing::backward_test
