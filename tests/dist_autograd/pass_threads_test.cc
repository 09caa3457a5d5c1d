// Which threads run the nodes of a pass, and what nodes and hooks may do there.
#include "tests/dist_autograd/remote_parts.h"
#include "tests/support/oracle.h"
#include "tests/support/world_test.h"

namespace stitch::testing::pass_threads_test {
namespace {

using dist_autograd::Context;

// x, and `hook` runs when backward comes by.
at::Tensor passing(const at::Tensor& x, std::function<void()> hook) {
  const auto y = x * 1;
  y.register_hook([hook = std::move(hook)](const at::Tensor&) { hook(); });
  return y;
}

// What the hook of hooked_on_arrival() does, on the worker that runs it.
std::function<void()> remote_hook;
at::Tensor hooked_on_arrival(at::Tensor x) {
  return passing(x, [] { remote_hook(); });
}
double doubled(double x) { return 2 * x; }

class PassThreads : public ::testing::Test {
 protected:
  // Every worker has one user-function thread.
  PassThreads() {
    remote_hook = [] {};
  }
  Cluster cluster_{2, {.num_threads = 1}};
};

TEST_F(PassThreads, TheThreadThatWaitsInBackwardRunsNodes) {
  const auto x = ones().requires_grad_();
  for (const bool remote : {false, true}) {
    std::thread::id ran_on;
    Context context;
    const auto y = remote ? rpc_sync<times_parameter>("worker1", x) : x * 2;
    const auto loss = passing(y, [&] { ran_on = std::this_thread::get_id(); }).sum();
    context.backward({loss});
    EXPECT_EQ(ran_on, std::this_thread::get_id());
  }
}

TEST_F(PassThreads, BackwardAsyncLeavesItsThreadAlone) {
  const auto x = ones().requires_grad_();
  std::thread::id ran_on;
  Context context;
  const auto loss = passing(rpc_sync<times_parameter>("worker1", x), [&] {
                      ran_on = std::this_thread::get_id();
                    }).sum();
  context.backward_async({loss}).get();
  EXPECT_NE(ran_on, std::thread::id());
  EXPECT_NE(ran_on, std::this_thread::get_id());
}

// The worker of the pass is current in its hooks, though the process has several.
TEST_F(PassThreads, AHookMayCallTheOtherWorker) {
  std::atomic<int> answers{0};
  remote_hook = [&] {
    if (rpc_sync<doubled>("worker0", 2.0) == 4) ++answers;
  };
  const auto x = ones().requires_grad_();
  Context context;
  const auto y = passing(rpc_sync<hooked_on_arrival>("worker1", x), [&] {
    if (rpc_sync<doubled>("worker1", 3.0) == 6) ++answers;
  });
  context.backward({y.sum()});
  EXPECT_EQ(answers, 2);
  EXPECT_TRUE(equal_gradients(context.gradient(x), ones()));
}

// A pass of its own over both workers.
at::Tensor nested_gradient(Worker& here, const std::string& other) {
  const WorkerScope scope(here);
  const at::AutoGradMode grad(true);
  const auto x = ones().requires_grad_();
  Context context;
  context.backward({rpc_sync<times_parameter>(other, x).sum()});
  return context.gradient(x);
}

TEST_F(PassThreads, AHookMayRunAPassOfItsOwn) {
  at::Tensor at_root, at_other;
  remote_hook = [&] { at_other = nested_gradient(cluster_[1], "worker0"); };
  const auto x = ones().requires_grad_();
  Context context;
  const auto y = passing(rpc_sync<hooked_on_arrival>("worker1", x),
                         [&] { at_root = nested_gradient(cluster_[0], "worker1"); });
  context.backward({y.sum()});
  EXPECT_TRUE(equal_gradients(context.gradient(x), ones()));
  EXPECT_TRUE(equal_gradients(at_root, parameter_of(cluster_[1]).detach()));
  EXPECT_TRUE(equal_gradients(at_other, parameter_of(cluster_[0]).detach()));
}

TEST_F(PassThreads, AHookThatThrowsOnTheWaitingThreadEndsThePass) {
  const auto x = ones().requires_grad_();
  Context context;
  const auto y = passing(rpc_sync<times_parameter>("worker1", x),
                         [] { throw std::runtime_error("the hook has had enough"); });
  const Error error = error_of([&] { context.backward({y.sum()}); });
  EXPECT_EQ(error.code(), ErrorCode::remote_exception);
  EXPECT_NE(std::string(error.what()).find("the hook has had enough"), std::string::npos);
  EXPECT_TRUE(eventually([&] { return count_on(cluster_[1], "passes") == 0; }));
}

TEST_F(PassThreads, AHookThatBlocksKeepsNeitherCallsNorOtherPassesWaiting) {
  Gate gate;
  remote_hook = [&] {
    const BlockingRegion blocking;
    gate.pass();
  };
  const auto x = ones().requires_grad_();
  Context blocked;
  const auto held = blocked.backward_async({rpc_sync<hooked_on_arrival>("worker1", x).sum()});
  ASSERT_TRUE(gate.wait_for_arrival());
  EXPECT_EQ(rpc_sync<doubled>("worker1", 2.0), 4);
  {
    Context context;
    context.backward({rpc_sync<times_parameter>("worker1", x).sum()});
    EXPECT_TRUE(equal_gradients(context.gradient(x), parameter_of(cluster_[1]).detach()));
  }
  EXPECT_FALSE(held.ready());
  gate.open();
  held.get();
  EXPECT_TRUE(equal_gradients(blocked.gradient(x), ones()));
}

at::Tensor gradient_made_in_a_handler(at::Tensor x) {
  x = x.detach().requires_grad_();
  Context context;
  context.backward({rpc_sync<times_parameter>("worker0", x).sum()});
  return context.gradient(x);
}

TEST_F(PassThreads, AHandlerMayWaitInBackward) {
  const auto gradient = rpc_sync<gradient_made_in_a_handler>("worker1", ones());
  EXPECT_TRUE(equal_gradients(gradient, parameter_of(cluster_[0]).detach()));
}

TEST_F(PassThreads, TheGradModeOfTheWaitingThreadDoesNotReachGradients) {
  const auto x = ones().requires_grad_();
  Context context;
  const auto loss = rpc_sync<times_parameter>("worker1", x).sum();
  const at::NoGradGuard no_grad;
  context.backward({loss});
  EXPECT_FALSE(at::GradMode::is_enabled());
  EXPECT_TRUE(equal_gradients(context.gradient(x), parameter_of(cluster_[1]).detach()));
}

}  // namespace
}  // namespace stitch::testing::pass_threads_test
