#include "tests/dist_autograd/remote_parts.h"
#include "tests/support/oracle.h"
#include "tests/support/world_test.h"

namespace stitch::testing::context_test {
namespace {

using dist_autograd::Context;

bool carries_context() { return dist_autograd::has_current_context(); }
// Two results that require grad (where their arguments do) around one that does not.
std::vector<at::Tensor> scaled_pair(std::vector<at::Tensor> tensors) {
  return {tensors.front() * 2, ones(), tensors.back() * 3};
}
at::Tensor fetch_times_parameter(RRef<at::Tensor> tensor) {
  return times_parameter(tensor.to_here());
}
at::Tensor plus_two_elements(at::Tensor x) { return x + at::ones({2}, at::kDouble); }
std::uint64_t context_counter() { return dist_autograd::current_context().id().counter; }

TEST(Context, IsCarriedByCallsOnlyWhileItIsCurrent) {
  Cluster cluster(2);
  EXPECT_FALSE(rpc_sync<carries_context>("worker1"));
  {
    Context context;
    EXPECT_TRUE(dist_autograd::has_current_context());
    EXPECT_EQ(rpc_sync<context_counter>("worker1"), context.id().counter);
    {
      const at::NoGradGuard off;
      EXPECT_TRUE(rpc_sync<carries_context>("worker1"));
    }
  }
  EXPECT_FALSE(dist_autograd::has_current_context());
  EXPECT_FALSE(rpc_sync<carries_context>("worker1"));
  EXPECT_TRUE(nothing_is_left(cluster));
}

TEST(Context, SaysSoWhenNoneIsCurrent) {
  Cluster cluster(1);
  const Error error =
      stitch::testing::error_of([&] { static_cast<void>(dist_autograd::current_context()); });
  EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument,
                       "no dist_autograd context is current on this thread"));
}

TEST(Context, NestsAndRestoresTheOuterOne) {
  Cluster cluster(2);
  Context outer;
  {
    Context inner;
    EXPECT_NE(inner.id(), outer.id());
    EXPECT_EQ(dist_autograd::current_context().id(), inner.id());
    EXPECT_EQ(rpc_sync<context_counter>("worker1"), inner.id().counter);
  }
  EXPECT_EQ(dist_autograd::current_context().id(), outer.id());
  EXPECT_EQ(rpc_sync<context_counter>("worker1"), outer.id().counter);
}

TEST(Context, RefusesALossMadeUnderAnotherContext) {
  Cluster cluster(2);
  Context outer;
  const auto loss = rpc_sync<times_parameter>("worker1", ones()).sum();
  Context inner;
  const Error error =
      stitch::testing::error_of([&] { inner.backward({loss}, {.retain_graph = true}); });
  EXPECT_TRUE(contains(error.what(), "received under another context")) << error.what();
}

// Found out only when marking begins, on a thread of the worker.
TEST(Context, RefusesALossMadePartlyUnderAnotherContextWhenMarkingFindsIt) {
  Cluster cluster(2);
  Context outer;
  const auto received = rpc_sync<times_parameter>("worker1", ones());
  for (const bool waits : {true, false}) {
    Context inner;
    const auto loss = received * 2;
    rpc_sync<times_parameter>("worker1", loss);  // its result is not used
    const auto error = error_of([&] {
      if (waits) {
        inner.backward({loss.sum()}, {.retain_graph = true});
      } else {
        inner.backward_async({loss.sum()}, {.retain_graph = true}).get();
      }
    });
    EXPECT_TRUE(contains(error.what(), "received under another context")) << error.what();
    EXPECT_TRUE(
        contains(std::string(error_of([&] { static_cast<void>(inner.gradients()); }).what()),
                 "another context"));
  }
}

TEST(Context, TravelsIntoContinuationsAndThreadsThatAskForIt) {
  Cluster cluster(2);
  Context context;
  auto chained = rpc_async<times_parameter>("worker1", ones()).then([](at::Tensor y) {
    return rpc_async<times_parameter>("worker1", y);
  });
  at::Tensor from_thread;
  std::thread own([&, id = context.id()] {
    const WorkerScope worker(cluster[0]);
    EXPECT_FALSE(dist_autograd::has_current_context());
    const auto scope = dist_autograd::context_scope(id);
    from_thread = rpc_sync<times_parameter>("worker1", ones());
  });
  own.join();
  context.backward({(chained.get() + from_thread).sum()});
  const auto p = parameter_of(cluster[1]).detach();
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[1], context.id()), 2 * p + 1));
}

Future<at::Tensor> coroutine_via(std::string next, at::Tensor x) {
  at::Tensor y = co_await rpc_async<times_parameter>(next, x);
  co_return co_await rpc_async<times_parameter>(next, y * own_parameter());
}

TEST(Context, TravelsThroughCoroutineHandlers) {
  Cluster cluster(3);
  Context context;
  const auto loss = rpc_sync<coroutine_via>("worker1", "worker2", ones()).sum();
  context.backward({loss});
  const auto p = parameter_of(cluster[1]).detach(), q = parameter_of(cluster[2]).detach();
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[1], context.id()), q * q));
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[2], context.id()), 2 * p * q));
}

Future<bool> coroutine_with_context(std::string callee) {
  Context context;
  const at::Tensor y = co_await rpc_async<times_parameter>(callee, ones());
  const std::vector<at::Tensor> roots(1, y.sum());
  co_await context.backward_async(roots);
  co_return dist_autograd::current_context().id() == context.id();
}

TEST(Context, LivesInACoroutineAndLeavesItsCallerAlone) {
  Cluster cluster(2);
  auto running = coroutine_with_context("worker1");
  EXPECT_FALSE(dist_autograd::has_current_context());
  EXPECT_TRUE(running.get());
  EXPECT_TRUE(nothing_is_left(cluster));
}

// It would be recorded where no pass of this context looks.
TEST(Context, RefusesTensorsInACallThatAnotherWorkerOfTheProcessMakes) {
  Cluster cluster(3);
  const auto by_worker0 = remote<times_parameter>("worker1", ones());
  {
    const WorkerScope scope(cluster[2]);
    Context context;
    const auto x = ones().requires_grad_(true);
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { cluster[0].rpc_sync<times_parameter>("worker1", x); },
             [&] { by_worker0.rpc_sync<&at::Tensor::mm>(x); }}) {
      const auto error = error_of(call);
      EXPECT_TRUE(
          has_text(error, ErrorCode::invalid_argument,
                   "belongs to worker \"worker2\" (id 2), which is current, and the call is "
                   "made by worker \"worker0\" (id 0) of the same process"));
    }
    // Nor would the gradients of what the result is made of find their way.
    const auto error = error_of([&] { cluster[0].rpc_sync<times_parameter>("worker1", ones()); });
    EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument,
                         "which worker \"worker0\" (id 0) that made the call takes no part in"));
    EXPECT_FALSE(contains(error.what(), "does not match its type"));
    {
      const at::NoGradGuard off;
      EXPECT_FALSE(cluster[0].rpc_sync<times_parameter>("worker1", ones()).requires_grad());
    }
    context.backward({rpc_sync<times_parameter>("worker1", x).sum()});
    EXPECT_EQ(context.gradients().count(x), 1U);
  }
  EXPECT_TRUE(nothing_is_left(cluster));
}

TEST(Context, BelongsToTheWorkerThatWasCurrentWhenItWasMade) {
  Cluster cluster(3);
  const WorkerScope scope(cluster[2]);
  Context context;
  EXPECT_EQ(context.id().home, cluster[2].id());
  context.backward({rpc_sync<via>("worker0", std::vector<std::string>{"worker1"}, ones()).sum()});
  EXPECT_TRUE(
      equal_gradients(gradient_on(cluster[0], context.id()), parameter_of(cluster[1]).detach()));
}

TEST(Context, FreesEverythingOnEveryWorkerItReached) {
  Cluster cluster(4);
  {
    Context context;
    const auto loss =
        rpc_sync<via>("worker1", std::vector<std::string>{"worker2", "worker3", "worker1"}, ones())
            .sum();
    EXPECT_GT(count_on(cluster[3], "links"), 0);
    context.backward({loss}, {.retain_graph = true});
    EXPECT_EQ(count_on(cluster[2], "contexts"), 1);
    EXPECT_EQ(count_on(cluster[2], "gradients"), 1);
  }
  EXPECT_TRUE(nothing_is_left(cluster));
}

TEST(Context, RemembersOnlyAFewOfManyEndedContexts) {
  Cluster cluster(3);
  for (int i = 0; i < 300; ++i) {
    Context context;
    rpc_sync<via>("worker1", std::vector<std::string>{"worker2"}, ones());
  }
  EXPECT_TRUE(nothing_is_left(cluster));
  for (int i = 0; i < 3; ++i) EXPECT_LT(count_on(cluster[i], "ended_contexts_remembered"), 20);
}

TEST(Context, MayEndWithCallsInFlight) {
  Cluster cluster(3);
  std::vector<Future<at::Tensor>> late;
  for (int i = 0; i < 50; ++i) {
    Context context;
    late.push_back(rpc_async<via>("worker1", std::vector<std::string>{"worker2", "worker1"},
                                  ones().requires_grad_()));
  }
  for (auto& future : late) EXPECT_TRUE(future.get().defined());
  EXPECT_TRUE(nothing_is_left(cluster));
}

TEST(Context, ShowsTheGraphOfAllWorkers) {
  Cluster cluster(3);
  Context context;
  const auto loss =
      rpc_sync<via>("worker1", std::vector<std::string>{"worker2"}, ones().requires_grad_()).sum();
  const std::string dot = context.graph_dot({loss});
  for (const char* expected :
       {"digraph", "3 workers, 4 links", "label=\"worker0\"", "label=\"worker1\"",
        "label=\"worker2\"", "SumBackward", "MulBackward", "RecvNode", "via() to worker",
        "leaf [3]", "style=dashed", "#b0b0b0"}) {
    EXPECT_TRUE(contains(dot, expected)) << expected << " is missing in\n" << dot;
  }
}

TEST(Context, ShowsTheLastPassInItsGraph) {
  Cluster cluster(2);
  Context context;
  const auto x = ones().requires_grad_();
  const auto used = rpc_sync<times_parameter>("worker1", x);
  rpc_sync<times_parameter>("worker1", x * 2);
  context.backward({used.sum()});
  const std::string dot = context.graph_dot();
  EXPECT_TRUE(contains(dot, "label=\"worker1\\nlast pass: 4 nodes in ")) << dot;
  EXPECT_TRUE(contains(dot, "label=\" 24 B\"")) << dot;
  EXPECT_TRUE(contains(dot, "color=\"#b0b0b0\"")) << "unused links are grey\n" << dot;
}

TEST(Context, ThrowsCancelledFromAHandleThatOutlivesIt) {
  Cluster cluster(1);
  std::optional<dist_autograd::ContextHandle> handle;
  {
    Context context;
    handle = dist_autograd::current_context();
  }
  const auto x = ones().requires_grad_();
  EXPECT_EQ(error_of([&] { handle->backward({x.sum()}); }).code(), ErrorCode::cancelled);
  EXPECT_EQ(error_of([&] { static_cast<void>(handle->gradients()); }).code(), ErrorCode::cancelled);
  EXPECT_EQ(error_of([&] { static_cast<void>(handle->gradient(x)); }).code(), ErrorCode::cancelled);
  EXPECT_EQ(error_of([&] { static_cast<void>(handle->graph_dot()); }).code(), ErrorCode::cancelled);
  EXPECT_EQ(error_of([&] { handle->throw_if_unusable(); }).code(), ErrorCode::cancelled);
}

TEST(Context, IsKnownToHaveEndedWhereverItHasBeen) {
  Cluster cluster(3);
  dist_autograd::ContextId id;
  {
    Context context;
    id = context.id();
    rpc_sync<times_parameter>("worker1", ones());
    EXPECT_TRUE(dist_autograd::find_usable_context(id));
  }
  const auto find_on = [&](int rank) {
    const WorkerScope scope(cluster[rank]);
    return dist_autograd::find_usable_context(id).has_value();
  };
  EXPECT_EQ(error_of([&] { find_on(0); }).code(), ErrorCode::cancelled);
  EXPECT_TRUE(refuses(cluster[1], id, ErrorCode::cancelled, "has ended"));
  EXPECT_EQ(error_of([&] { find_on(1); }).code(), ErrorCode::cancelled);
  EXPECT_FALSE(find_on(2));  // it never came there
  EXPECT_EQ(refusal_on(cluster[2], id)->code(), ErrorCode::invalid_argument);
}

TEST(Context, DoesNotBecomeCurrentAgainWhenContextsEndOutOfOrder) {
  Cluster cluster(2);
  Context outermost;
  auto outer = std::make_unique<Context>();
  auto inner = std::make_unique<Context>();
  outer.reset();
  EXPECT_EQ(dist_autograd::current_context().id(), inner->id());
  inner.reset();
  EXPECT_EQ(dist_autograd::current_context().id(), outermost.id());
  EXPECT_EQ(rpc_sync<context_counter>("worker1"), outermost.id().counter);
}

TEST(Context, IsNoLongerCurrentInAContinuationThatOutlivesIt) {
  Cluster cluster(1);
  Promise<void> go;
  Future<std::optional<ErrorCode>> after;
  {
    Context context;
    after = go.future().then([]() -> std::optional<ErrorCode> {
      if (dist_autograd::has_current_context()) return std::nullopt;
      try {
        static_cast<void>(dist_autograd::current_context());
      } catch (const Error& error) {
        return error.code();
      }
      return std::nullopt;
    });
  }
  go.set_value();
  EXPECT_EQ(after.get(), ErrorCode::cancelled);
}

TEST(Context, RemembersOnlyAFewOfManyPassesThatReachOnlySomeWorkers) {
  for (const bool marks : {false, true}) {
    SCOPED_TRACE(marks);
    Cluster cluster(3);
    Context context;
    // Where the requests make links, too, each pass leaves one unused.
    const auto x = ones().requires_grad_(marks);
    const auto a = rpc_sync<times_parameter>("worker1", x).sum();
    const auto b = rpc_sync<times_parameter>("worker2", x).sum();
    for (int i = 0; i < 100; ++i) {
      context.backward({a}, {.retain_graph = true});
      context.backward({b}, {.retain_graph = true});
    }
    for (int i = 0; i < 3; ++i)
      EXPECT_LT(count_on(cluster[i], "ended_passes_remembered"), 5) << "on worker " << i;
    for (int i = 1; i < 3; ++i)
      EXPECT_TRUE(equal_gradients(gradient_on(cluster[i], context.id()), 100 * ones()));
  }
}

// Waits in backward.
Gate late_gate;
struct WaitsForTheLateGate : torch::autograd::Function<WaitsForTheLateGate> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x * 1; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list grads) {
    late_gate.pass();
    return grads;
  }
};

TEST(Context, OpensAPassWhoseFirstMessageComesAfterTheEndsOfLaterOnes) {
  late_gate.close();
  Cluster cluster(3);
  Context context;
  const auto a = rpc_sync<times_parameter>("worker1", ones()).sum();
  const auto b = rpc_sync<times_parameter>("worker2", ones()).sum();
  const auto late = WaitsForTheLateGate::apply(rpc_sync<times_parameter>("worker1", ones())).sum();
  const auto held =
      context.backward_async({late}, {.retain_graph = true, .timeout = std::chrono::seconds(60)});
  ASSERT_TRUE(late_gate.wait_for_arrival());
  for (int i = 0; i < 50; ++i) {
    context.backward({a}, {.retain_graph = true});
    context.backward({b}, {.retain_graph = true});
  }
  EXPECT_LT(count_on(cluster[1], "ended_passes_remembered"), 5);
  late_gate.open();
  held.get();
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[1], context.id()), 51 * ones()));
  EXPECT_LT(count_on(cluster[1], "ended_passes_remembered"), 5);
}

TEST(Context, MakesOneNodeForAllTensorsOfAMessage) {
  Cluster cluster(2);
  Context context;
  const auto a = ones().requires_grad_(), b = (2 * ones()).requires_grad_();
  const auto results =
      rpc_sync<scaled_pair>("worker1", std::vector<at::Tensor>{a, b.detach(), b, a * b});
  EXPECT_EQ(count_on(cluster[0], "links"), 1);
  EXPECT_EQ(count_on(cluster[1], "links"), 1);
  ASSERT_EQ(results.size(), 3u);
  EXPECT_FALSE(results[1].requires_grad());
  // Behind one for each of them.
  EXPECT_NE(results[0].grad_fn(), results[2].grad_fn());
  const auto edge = results[0].grad_fn()->next_edge(0), other = results[2].grad_fn()->next_edge(0);
  EXPECT_EQ(edge.function, other.function);
  EXPECT_EQ(edge.input_nr + other.input_nr, 1u);
  EXPECT_EQ(edge.function->num_inputs(), 2u);
  EXPECT_TRUE(edge.function->next_edges().empty());
  rpc_sync<scaled_pair>("worker1", std::vector<at::Tensor>{b.detach()});
  EXPECT_EQ(count_on(cluster[0], "links"), 1);  // nothing in it requires grad
}

TEST(Context, HasTheLinksOfCallsThatComeBackToTheirCaller) {
  for (const bool fetched : {false, true}) {
    Cluster cluster(2);
    Context context;
    const auto x = ones().requires_grad_();
    const std::vector<std::string> back{"worker0"};
    const at::Tensor y =
        fetched ? remote<via>("worker1", back, x).to_here() : rpc_sync<via>("worker1", back, x);
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(count_on(cluster[i], "contexts"), 1);
      EXPECT_EQ(count_on(cluster[i], "links"), 2) << "of a request and of an answer";
    }
    context.backward({y.sum()});
    const auto p = parameter_of(cluster[0]).detach(), q = parameter_of(cluster[1]).detach();
    EXPECT_TRUE(equal_gradients(context.gradient(x), p * q));
    EXPECT_TRUE(equal_gradients(gradient_on(cluster[0], context.id()), q));
    EXPECT_TRUE(equal_gradients(gradient_on(cluster[1], context.id()), p));
  }
}

TEST(Context, IsThatOfWhatAnotherWorkerFetches) {
  Cluster cluster(3);
  Context context;
  const auto x = ones().requires_grad_();
  const auto kept = remote<times_parameter>("worker1", x);
  context.backward({rpc_sync<fetch_times_parameter>("worker2", kept).sum()});
  const auto p = parameter_of(cluster[1]).detach(), q = parameter_of(cluster[2]).detach();
  EXPECT_TRUE(equal_gradients(context.gradient(x), p * q));
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[1], context.id()), q));
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[2], context.id()), p));
}

TEST(Context, GoesOnAfterACallThatFails) {
  Cluster cluster(2);
  {
    Context context;
    const auto x = ones().requires_grad_();
    const auto error = error_of([&] { rpc_sync<plus_two_elements>("worker1", x * 2); });
    EXPECT_EQ(error.code(), ErrorCode::remote_exception);
    context.backward({rpc_sync<times_parameter>("worker1", x).sum()});
    EXPECT_TRUE(equal_gradients(context.gradient(x), parameter_of(cluster[1]).detach()));
  }
  EXPECT_TRUE(nothing_is_left(cluster));
}

}  // namespace
}  // namespace stitch::testing::context_test
