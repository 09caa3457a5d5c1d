#include "tests/dist_autograd/remote_parts.h"
#include "tests/support/oracle.h"
#include "tests/support/world_test.h"

namespace stitch::testing::backward_errors_test {
namespace {

using dist_autograd::Context;
using namespace std::chrono_literals;

// What the node below does when a pass reaches it on the worker of that id.
struct Behaviour {
  std::atomic<int> throws_on{-1};
  std::atomic<int> waits_on{-1};
  std::atomic<bool> waiting{false};
  std::atomic<bool> go{false};
};
Behaviour& behaviour() {
  static Behaviour one;
  return one;
}

struct Touchy : torch::autograd::Function<Touchy> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x,
                            std::int64_t worker) {
    context->saved_data["worker"] = worker;
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto worker = context->saved_data["worker"].toInt();
    if (behaviour().throws_on == worker)
      throw std::runtime_error("worker " + std::to_string(worker) + " is touchy");
    if (behaviour().waits_on == worker) {
      behaviour().waiting = true;
      while (!behaviour().go) std::this_thread::sleep_for(1ms);
    }
    return {grads[0], at::Tensor()};
  }
};

at::Tensor touchy_via(std::vector<std::string> path, at::Tensor x) {
  x = Touchy::apply(x * own_parameter(),
                    static_cast<std::int64_t>(rpc::current_agent()->self().id.value()));
  if (path.empty()) return x;
  const std::string next = path.front();
  path.erase(path.begin());
  return Touchy::apply(rpc_sync<touchy_via>(next, path, x),
                       static_cast<std::int64_t>(rpc::current_agent()->self().id.value()));
}

at::Tensor touchy_sum_via(std::string next, at::Tensor x) {
  return rpc_sync<touchy_via>(next, std::vector<std::string>{}, x * own_parameter()).sum();
}

class BackwardErrors : public ::testing::Test {
 protected:
  BackwardErrors() {
    behaviour().throws_on = -1;
    behaviour().waits_on = -1;
    behaviour().waiting = false;
    behaviour().go = false;
  }
};

TEST_F(BackwardErrors, EndThePassEverywhereWhicheverWorkerThrows) {
  Cluster cluster(4);
  for (int thrower = 0; thrower < 4; ++thrower) {
    behaviour().throws_on = thrower;
    {
      Context context;
      const auto x = ones().requires_grad_();
      const auto start = Touchy::apply(x * 1, std::int64_t{0});
      const auto loss =
          rpc_sync<touchy_via>("worker1", std::vector<std::string>{"worker2", "worker3", "worker1"},
                               start)
              .sum();
      const Error error = stitch::testing::error_of([&] { context.backward({loss}); });
      const std::string name = "worker" + std::to_string(thrower), text = error.what();
      EXPECT_EQ(error.code(), ErrorCode::remote_exception);
      EXPECT_EQ(error.worker(), name);
      EXPECT_EQ(error.remote(), thrower != 0);
      EXPECT_TRUE(contains(text, "backward failed on worker \"" + name + "\"")) << text;
      EXPECT_TRUE(contains(text, "worker " + std::to_string(thrower) + " is touchy")) << text;
      EXPECT_TRUE(contains(text, "Touchy")) << text;
      EXPECT_TRUE(eventually([&] {
        for (int i = 0; i < 4; ++i) {
          if (count_on(cluster[i], "passes") != 0) return false;
        }
        return true;
      }));
      // What leaves have added by then is partial: it cannot be read, and no pass adds to it.
      behaviour().throws_on = -1;
      const std::string first = "worker " + std::to_string(thrower) + " is touchy";
      for (int i = 0; i < 4; ++i) {
        EXPECT_TRUE(refuses(cluster[i], context.id(), ErrorCode::remote_exception, first));
        EXPECT_TRUE(eventually([&] { return count_on(cluster[i], "gradients") == 0; }));
      }
      const auto y = rpc_sync<touchy_via>("worker1", std::vector<std::string>{"worker2"}, x);
      const auto again = error_of([&] { context.backward({y.sum()}); });
      EXPECT_TRUE(contains(again.what(), first)) << again.what();
      EXPECT_EQ(again.worker(), "worker" + std::to_string(thrower));
      EXPECT_THROW(static_cast<void>(context.gradient(x)), Error);
    }
    EXPECT_TRUE(nothing_is_left(cluster)) << "after worker " << thrower << " threw";
  }
}

TEST_F(BackwardErrors, EndTheWaitWhenTheDeadlinePasses) {
  Cluster cluster(3);
  behaviour().waits_on = 2;
  Context context;
  const auto loss =
      rpc_sync<touchy_via>("worker1", std::vector<std::string>{"worker2"}, ones()).sum();
  const auto start = std::chrono::steady_clock::now();
  const Error error =
      stitch::testing::error_of([&] { context.backward({loss}, {.timeout = 200ms}); });
  const auto took = std::chrono::steady_clock::now() - start;
  EXPECT_GE(took, 200ms);
  EXPECT_LT(took, 5s);
  EXPECT_TRUE(has_text(error, ErrorCode::timeout, "backward timed out after "));
  EXPECT_TRUE(contains(error.what(), "worker \"worker1\"")) << error.what();
  EXPECT_TRUE(refuses(cluster[1], context.id(), ErrorCode::timeout, "timed out after "));
  behaviour().go = true;
  EXPECT_TRUE(eventually([&] { return count_on(cluster[2], "passes") == 0; }));
  EXPECT_TRUE(refuses(cluster[2], context.id(), ErrorCode::timeout, "timed out after "));
}

TEST_F(BackwardErrors, EndThePassWhenItsFutureIsCancelled) {
  Cluster cluster(3);
  behaviour().waits_on = 2;
  Context context;
  const auto loss =
      rpc_sync<touchy_via>("worker1", std::vector<std::string>{"worker2"}, ones()).sum();
  const auto future = context.backward_async({loss});
  ASSERT_TRUE(eventually([] { return behaviour().waiting.load(); }));
  future.cancel();
  EXPECT_EQ(error_of([&] { future.get(); }).code(), ErrorCode::cancelled);
  EXPECT_EQ(error_of([&] { static_cast<void>(context.gradients()); }).code(), ErrorCode::cancelled);
  EXPECT_TRUE(refuses(cluster[1], context.id(), ErrorCode::cancelled, "backward was cancelled"));
  behaviour().go = true;
  EXPECT_TRUE(eventually([&] {
    for (int i = 0; i < 3; ++i) {
      if (count_on(cluster[i], "passes") != 0) return false;
    }
    return true;
  }));
}

TEST_F(BackwardErrors, EndThePassWhenItsContextEnds) {
  Cluster cluster(3);
  behaviour().waits_on = 2;
  Future<void> future;
  {
    Context context;
    const auto loss =
        rpc_sync<touchy_via>("worker1", std::vector<std::string>{"worker2"}, ones()).sum();
    future = context.backward_async({loss});
    ASSERT_TRUE(eventually([] { return behaviour().waiting.load(); }));
  }
  const Error error = stitch::testing::error_of([&] { future.get(); });
  EXPECT_EQ(error.code(), ErrorCode::cancelled) << error.what();
  behaviour().go = true;
  EXPECT_TRUE(nothing_is_left(cluster));
}

TEST_F(BackwardErrors, FailWhenAWorkerLeavesInTheMiddle) {
  Cluster cluster(3);
  behaviour().waits_on = 2;
  Context context;
  const auto loss =
      rpc_sync<touchy_via>("worker1", std::vector<std::string>{"worker2"}, ones()).sum();
  const auto future = context.backward_async({loss});
  ASSERT_TRUE(eventually([] { return behaviour().waiting.load(); }));
  std::thread leaving([&] {
    try {
      cluster[2].shutdown({.graceful = false, .timeout = 5s});
    } catch (const Error&) {
    }
  });
  const Error error = stitch::testing::error_of([&] { future.get(); });
  EXPECT_TRUE(error.code() == ErrorCode::disconnected || error.code() == ErrorCode::shutting_down)
      << error.what();
  EXPECT_TRUE(contains(error.what(), "worker2")) << error.what();
  EXPECT_TRUE(refusal_on(cluster[0], context.id()));
  EXPECT_TRUE(eventually([&] { return refusal_on(cluster[1], context.id()).has_value(); }));
  behaviour().go = true;
  leaving.join();
  Context after;
  const auto x = ones().requires_grad_();
  after.backward({rpc_sync<times_parameter>("worker1", x).sum()});
  EXPECT_TRUE(equal_gradients(after.gradient(x), parameter_of(cluster[1]).detach()));
}

TEST_F(BackwardErrors, EndTheOtherPassesOfTheContext) {
  Cluster cluster(3);
  behaviour().throws_on = 1;
  behaviour().waits_on = 2;
  Context context;
  const auto x = ones().requires_grad_();
  const auto slow = rpc_sync<touchy_via>("worker2", std::vector<std::string>{}, x).sum();
  const auto waiting = context.backward_async({slow});
  ASSERT_TRUE(eventually([] { return behaviour().waiting.load(); }));
  const auto bad = rpc_sync<touchy_via>("worker1", std::vector<std::string>{}, x).sum();
  const auto error = error_of([&] { context.backward({bad}); });
  EXPECT_STREQ(error_of([&] { waiting.get(); }).what(), error.what());
  EXPECT_TRUE(refuses(cluster[2], context.id(), ErrorCode::remote_exception, "worker 1 is touchy"));
  behaviour().go = true;
}

double failing_backward(at::Tensor x) {
  const auto loss = rpc_sync<touchy_via>("worker2", std::vector<std::string>{}, x).sum();
  try {
    dist_autograd::current_context().backward({loss});
  } catch (const Error&) {
    return 1;
  }
  return 0;
}

TEST(FailedPasses, AreKnownAtTheHomeAndAtWorkersThatTookNoPart) {
  Cluster cluster(4);
  behaviour().throws_on = 2;
  Context context;
  rpc_sync<times_parameter>("worker3", ones().requires_grad_());
  EXPECT_EQ(rpc_sync<failing_backward>("worker1", ones()), 1);
  for (const int i : {0, 1, 2, 3}) {
    EXPECT_TRUE(
        refuses(cluster[i], context.id(), ErrorCode::remote_exception, "worker 2 is touchy"));
  }
  behaviour().throws_on = -1;
}

TEST(FailedPasses, DoNotComeFromArgumentsThatMakeNoSense) {
  Cluster cluster(1);
  Context context;
  const auto x = ones().requires_grad_();
  EXPECT_EQ(error_of([&] { context.backward({x * 2}); }).code(), ErrorCode::invalid_argument);
  context.backward({(x * 2).sum()});
  EXPECT_TRUE(equal_gradients(context.gradient(x), 2 * ones()));
}

TEST(FailedPasses, ComeFromCancellingABackwardThatRunsWhereTheLossLives) {
  Cluster cluster(3);
  behaviour().throws_on = -1;
  behaviour().go = behaviour().waiting = false;
  behaviour().waits_on = 2;
  Context context;
  const auto loss = remote<touchy_sum_via>("worker1", "worker2", ones());
  loss.to_here();
  const auto future = dist_autograd::backward_async(loss, context);
  ASSERT_TRUE(eventually([] { return behaviour().waiting.load(); }));
  future.cancel();
  EXPECT_TRUE(eventually([&] { return count_on(cluster[1], "passes") == 0; }));
  EXPECT_TRUE(refuses(cluster[1], context.id(), ErrorCode::cancelled));
  EXPECT_TRUE(refuses(cluster[0], context.id(), ErrorCode::cancelled));
  behaviour().go = true;
  EXPECT_TRUE(eventually([&] { return count_on(cluster[2], "passes") == 0; }));
}

TEST_F(BackwardErrors, AreNotCausedByALongPassUnderAShortCallTimeout) {
  Cluster cluster(3, {.rpc_timeout = 1s});
  behaviour().waits_on = 2;
  Context context;
  const auto loss =
      rpc_sync<touchy_via>("worker1", std::vector<std::string>{"worker2"}, ones()).sum();
  const auto future = context.backward_async({loss});
  EXPECT_FALSE(future.wait_for(1500ms));
  behaviour().go = true;
  EXPECT_NO_THROW(future.get());
}

}  // namespace
}  // namespace stitch::testing::backward_errors_test
