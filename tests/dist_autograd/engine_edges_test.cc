// What libtorch's engine refuses, and what it does where a graph or a thread ends, over workers.
#include <ATen/Parallel.h>
#include <ATen/SavedTensorHooks.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/engine.h>

#include "stitch/dist_autograd/graph/compat.h"
#include "tests/dist_autograd/remote_parts.h"
#include "tests/support/equal_gradients.h"
#include "tests/support/world_test.h"

namespace stitch::testing::engine_edges_test {
namespace {

using dist_autograd::Context;
using dist_autograd::make_node;
using torch::autograd::variable_list;

class EngineEdges : public ::testing::Test {
 protected:
  // What a pass through a call to worker1 fails with, which has to be an error of that worker.
  template <auto Function>
  Error failure(const at::Tensor& x) {
    Cluster cluster(2);
    Context context;
    const auto loss = rpc_sync<Function>("worker1", x).sum();
    Error error = error_of([&] { context.backward({loss}); });
    EXPECT_EQ(error.worker(), "worker1") << error.what();
    EXPECT_EQ(error.code(), ErrorCode::remote_exception);
    EXPECT_TRUE(refuses(cluster[1], context.id(), ErrorCode::remote_exception));
    return error;
  }
};

::testing::AssertionResult fails_locally(const at::Tensor& loss) {
  try {
    torch::autograd::backward({loss});
  } catch (const std::exception&) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "libtorch's engine accepts it";
}

// ---- what a node returns

// Its forward is y = x; backward is what `returns` makes of the gradient.
struct Returns final : torch::autograd::Node {
  using Function = variable_list (*)(const at::Tensor& gradient);
  explicit Returns(Function function) : returns(function) {}
  variable_list apply(variable_list&& gradients) override { return returns(gradients[0]); }
  std::string name() const override { return "Returns"; }
  Function returns;
};
at::Tensor through(const at::Tensor& x, Returns::Function returns) {
  const auto node = make_node<Returns>(returns);
  node->set_next_edges(torch::autograd::collect_next_edges(x));
  at::Tensor y = x.detach().clone();
  torch::autograd::set_history(y, node);
  return y;
}

at::Tensor too_many(at::Tensor x) {
  return through(x, [](const at::Tensor& gradient) { return variable_list{gradient, gradient}; });
}
at::Tensor too_few(at::Tensor x) {
  return through(x, [](const at::Tensor&) { return variable_list{}; });
}
at::Tensor compressed(at::Tensor x) {
  return through(x, [](const at::Tensor& gradient) {
    return variable_list{gradient.contiguous().to_sparse_csr()};
  });
}
at::Tensor complex_gradient(at::Tensor x) {
  return through(
      x, [](const at::Tensor& gradient) { return variable_list{gradient.to(at::kComplexDouble)}; });
}

TEST_F(EngineEdges, AWrongNumberOfGradientsIsAnErrorOfItsWorker) {
  const auto x = ones().requires_grad_();
  EXPECT_TRUE(fails_locally(too_many(x).sum()));
  EXPECT_TRUE(fails_locally(too_few(x).sum()));
  EXPECT_TRUE(has_text(failure<too_many>(x), ErrorCode::remote_exception,
                       "function Returns returned 2 gradients, expected 1"));
  EXPECT_TRUE(has_text(failure<too_few>(x), ErrorCode::remote_exception,
                       "function Returns returned 0 gradients, expected 1"));
}

TEST_F(EngineEdges, AGradientOfAnotherLayoutIsAnErrorOfItsWorker) {
  const auto x = at::ones({2, 2}, at::kDouble).requires_grad_();
  EXPECT_TRUE(fails_locally(compressed(x).sum()));
  EXPECT_TRUE(has_text(failure<compressed>(x), ErrorCode::remote_exception,
                       "function Returns returned an invalid gradient at index 0: layout"));
}

TEST_F(EngineEdges, AComplexGradientOfARealTensorIsAnErrorOfItsWorker) {
  const auto x = ones().requires_grad_();
  EXPECT_TRUE(fails_locally(complex_gradient(x).sum()));
  EXPECT_TRUE(has_text(failure<complex_gradient>(x), ErrorCode::remote_exception,
                       "dtype ComplexDouble for an input of dtype Double"));
}

std::mutex edges_mutex;
std::vector<std::string> met;
void meet(const std::string& what) {
  const std::lock_guard lock(edges_mutex);
  met.push_back(what);
}
std::vector<std::string> take_met() {
  const std::lock_guard lock(edges_mutex);
  return std::exchange(met, {});
}

// A number on the meta device, made of a tensor on the CPU, and the way back, whose gradient is on
// the CPU: a number, which moves, or a tensor, which does not.
struct ToMeta : torch::autograd::Function<ToMeta> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) {
    return at::empty(x.sizes(), x.options().device(at::kMeta));
  }
  static variable_list backward(torch::autograd::AutogradContext*, variable_list grads) {
    meet(grads[0].device().str());
    return {at::full(grads[0].sizes(), 5.0, at::kDouble)};
  }
};
struct FromMeta : torch::autograd::Function<FromMeta> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) {
    return at::ones(x.sizes(), at::kDouble);
  }
  static variable_list backward(torch::autograd::AutogradContext*, variable_list grads) {
    return grads;
  }
};
at::Tensor by_meta_and_back(at::Tensor x) { return FromMeta::apply(ToMeta::apply(x)); }

TEST_F(EngineEdges, AGradientWithoutDimensionsMovesToTheDeviceOfItsTensorAndNoOther) {
  const auto number = at::ones({}, at::kDouble).requires_grad_();
  take_met();
  torch::autograd::backward({by_meta_and_back(number)});
  EXPECT_EQ(take_met(), std::vector<std::string>{"meta"});
  {
    Cluster cluster(2);
    Context context;
    context.backward({rpc_sync<by_meta_and_back>("worker1", number)});
    EXPECT_EQ(take_met(), std::vector<std::string>{"meta"});
    EXPECT_TRUE(equal_gradients(context.gradient(number), at::full({}, 5.0, at::kDouble)));
  }
  const auto row = ones().requires_grad_();
  EXPECT_TRUE(fails_locally(by_meta_and_back(row).sum()));
  EXPECT_TRUE(has_text(failure<by_meta_and_back>(row), ErrorCode::remote_exception,
                       "on device cpu, expected meta"));
}

// ---- hooks that look at what came in

at::Tensor& kept_input() {
  static at::Tensor one;
  return one;
}
struct KeepInput final : torch::autograd::FunctionPostHook {
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    kept_input() = inputs.at(0);
    return outputs;
  }
};
// Uses the memory of its gradient for something else where no other refers to it.
at::Tensor reuses(const at::Tensor& x) {
  return through(x * 1, [](const at::Tensor& gradient) {
    const at::Tensor twice = gradient * 2;
    const bool alone = gradient.use_count() == 1;
    if (alone) gradient.zero_();
    meet(alone ? "reused" : "kept");
    return variable_list{twice};
  });
}
at::Tensor reuses_unseen(at::Tensor x) { return reuses(x) * 3; }
at::Tensor reuses_seen(at::Tensor x) {
  const auto y = reuses(x);
  y.grad_fn()->add_post_hook(std::make_unique<KeepInput>());
  return y * 3;
}

TEST_F(EngineEdges, ANodeOwnsItsGradientUnlessAPostHookIsToSeeIt) {
  const auto x = ones().requires_grad_();
  take_met();
  for (const auto& f : {reuses_unseen, reuses_seen}) torch::autograd::backward({f(x).sum()});
  const std::vector<std::string> expected{"reused", "kept"};
  EXPECT_EQ(take_met(), expected) << "libtorch's engine";
  kept_input() = at::Tensor();
  Cluster cluster(2);
  Context context;
  const auto unseen = rpc_sync<reuses_unseen>("worker1", x);
  context.backward({unseen.sum()});
  const auto seen = rpc_sync<reuses_seen>("worker1", x);
  context.backward({seen.sum()});
  EXPECT_EQ(take_met(), expected);
  EXPECT_TRUE(equal_gradients(kept_input(), 3 * ones()));
  EXPECT_TRUE(equal_gradients(context.gradient(x), 12 * ones()));
  kept_input() = at::Tensor();
}

// ---- leaves and other ends

at::Tensor leaf_that_becomes_a_result(at::Tensor x) {
  auto leaf = ones().requires_grad_();
  const auto y = x + leaf;
  leaf.set_requires_grad(false);
  leaf.add_(own_parameter());
  return y;
}

TEST_F(EngineEdges, ALeafThatIsNoLongerOneIsAnErrorOfItsWorker) {
  Cluster cluster(2);
  {
    const WorkerScope scope(cluster[1]);
    EXPECT_TRUE(fails_locally(leaf_that_becomes_a_result(ones()).sum()));
  }
  EXPECT_TRUE(has_text(failure<leaf_that_becomes_a_result>(ones()), ErrorCode::remote_exception,
                       "it is no longer a leaf of the graph"));
}

struct Sink final : torch::autograd::Node {
  variable_list apply(variable_list&& gradients) override {
    meet(std::to_string(gradients.at(0).sum().item<double>()));
    return {};
  }
};
at::Tensor into_a_sink(at::Tensor x) {
  at::Tensor y = (x * 2).detach();
  torch::autograd::set_history(y, make_node<Sink>());
  return y * own_parameter();
}

TEST_F(EngineEdges, AnEndOfTheGraphThatIsNoLeafRunsLikeOthers) {
  Cluster cluster(2);
  take_met();
  {
    const WorkerScope scope(cluster[1]);
    torch::autograd::backward({into_a_sink(ones()).sum()});
    own_parameter().mutable_grad() = at::Tensor();
  }
  const auto expected = take_met();
  ASSERT_EQ(expected.size(), 1U);
  Context context;
  context.backward({rpc_sync<into_a_sink>("worker1", ones()).sum()});
  EXPECT_EQ(take_met(), expected);
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[1], context.id()), 2 * ones()));
}

// ---- threads

// Runs `look` in backward.
struct Looks : torch::autograd::Function<Looks> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x, int what) {
    context->saved_data["what"] = what;
    return x * 1;
  }
  static variable_list backward(torch::autograd::AutogradContext* context, variable_list grads);
};
enum class What : std::uint8_t { threads, thread_state, callback, other_exception, text };

// libtorch asks this for the threads that work on one operation.
int omp_threads() {
  using Count = int (*)();
  const auto count = reinterpret_cast<Count>(::dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
  return count == nullptr ? -1 : count();
}

variable_list Looks::backward(torch::autograd::AutogradContext* context, variable_list grads) {
  switch (static_cast<What>(context->saved_data["what"].toInt())) {
    case What::threads:
      meet(std::to_string(omp_threads()));
      break;
    case What::thread_state: {
      const bool info = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::TEST_INFO) != nullptr;
      meet(std::string(info ? "debug info" : "no debug info") +
           (at::SavedTensorDefaultHooks::is_enabled() ? ", hooks" : ", no hooks"));
      break;
    }
    case What::callback:
      torch::autograd::Engine::get_default_engine().queue_callback([] {});
      break;
    case What::other_exception:
      throw 7;
    case What::text:
      throw "no gradient today";
  }
  return {grads[0], at::Tensor()};
}
template <What Kind>
at::Tensor looks(at::Tensor x) {
  return Looks::apply(x * own_parameter(), static_cast<int>(Kind));
}
at::Tensor looks_via(std::string next, int what, at::Tensor x) {
  return Looks::apply(rpc_sync<looks<What::thread_state>>(next, x * own_parameter()), what);
}

TEST_F(EngineEdges, OperationsInNodesUseAsManyThreadsAsElsewhere) {
  if (omp_threads() < 0) GTEST_SKIP() << "this libtorch does not use OpenMP";
  const int before = at::get_num_threads();
  at::set_num_threads(before + 3);
  take_met();
  {
    Cluster cluster(2);  // its threads begin now
    Context context;
    const auto loss = rpc_sync<looks<What::threads>>("worker1", ones()).sum();
    context.backward_async({loss}).get();
  }
  at::set_num_threads(before);
  EXPECT_EQ(take_met(), std::vector<std::string>{std::to_string(before + 3)});
}

TEST_F(EngineEdges, NodesSeeNothingOfTheThreadThatCallsBackward) {
  Cluster cluster(2);
  Context context;
  const auto x = ones().requires_grad_();
  // Worker0 runs the first node itself, on the thread that waits, and the last on another.
  const auto loss = Looks::apply(rpc_sync<looks_via>("worker1", "worker0",
                                                     static_cast<int>(What::thread_state), x),
                                 static_cast<int>(What::thread_state))
                        .sum();
  take_met();
  const c10::DebugInfoGuard info(c10::DebugInfoKind::TEST_INFO,
                                 std::make_shared<c10::DebugInfoBase>());
  at::SavedTensorDefaultHooks::disable("not here");
  context.backward({loss});
  EXPECT_FALSE(at::SavedTensorDefaultHooks::is_enabled());
  at::SavedTensorDefaultHooks::enable();
  EXPECT_NE(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::TEST_INFO), nullptr);
  EXPECT_EQ(take_met(), std::vector<std::string>(3, "no debug info, hooks"));
}

TEST_F(EngineEdges, ACallbackOfLibtorchsEngineCannotBeQueued) {
  EXPECT_TRUE(has_text(failure<looks<What::callback>>(ones()), ErrorCode::remote_exception,
                       "Final callbacks can only be installed during backward pass"));
}

TEST_F(EngineEdges, WhatIsThrownNeedBeNoStandardException) {
  EXPECT_TRUE(has_text(failure<looks<What::other_exception>>(ones()), ErrorCode::remote_exception,
                       "Looks"));
  EXPECT_TRUE(has_text(failure<looks<What::text>>(ones()), ErrorCode::remote_exception,
                       "no gradient today"));
}

}  // namespace
}  // namespace stitch::testing::engine_edges_test
