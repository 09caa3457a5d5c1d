// What libtorch's engine does with hooks, leaves and modes, over workers, against that engine.
#include <cmath>

#include "stitch/dist_autograd/graph/compat.h"
#include "tests/dist_autograd/remote_parts.h"
#include "tests/support/equal_gradients.h"
#include "tests/support/world_test.h"

namespace stitch::testing::engine_rules_test {
namespace {

using dist_autograd::Context;
using torch::autograd::variable_list;

at::Tensor leaf(double first = 1) { return (at::arange(3, at::kDouble) + first).requires_grad_(); }

// ---- hooks

// What hooks have seen, in order.
std::mutex seen_mutex;
std::vector<std::string> seen;
void see(const std::string& what) {
  const std::lock_guard lock(seen_mutex);
  seen.push_back(what);
}
std::vector<std::string> take_seen() {
  const std::lock_guard lock(seen_mutex);
  return std::exchange(seen, {});
}

// Scale gradients by different factors, so that their order shows.
struct PreHook final : torch::autograd::FunctionPreHook {
  explicit PreHook(std::string node) : node(std::move(node)) {}
  variable_list operator()(const variable_list& grads) override {
    see("pre hook of " + node);
    return {grads[0] * grads[0]};
  }
  std::string node;
};
struct PostHook final : torch::autograd::FunctionPostHook {
  explicit PostHook(std::string node) : node(std::move(node)) {}
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    see("post hook of " + node + ", " + std::to_string(inputs.size()) + " inputs");
    variable_list changed = outputs;
    for (auto& each : changed) {
      if (each.defined()) each = each + 1;
    }
    return changed;
  }
  std::string node;
};

at::Tensor& hooked_leaf() {
  static at::Tensor one;
  return one;
}
at::Tensor& hooked_result() {
  static at::Tensor one;
  return one;
}
dist_autograd::NodePtr& hooked_accumulator() {
  static dist_autograd::NodePtr one;
  return one;
}

// x * a new leaf, with every kind of hook on the product and on the leaf.
at::Tensor with_all_hooks(at::Tensor x) {
  const auto parameter = leaf(2);
  parameter.register_hook([](const at::Tensor& grad) {
    see("tensor hook of the leaf");
    return grad.clamp_max(20);
  });
  hooked_accumulator() = torch::autograd::impl::grad_accumulator(parameter);
  hooked_accumulator()->add_pre_hook(std::make_unique<PreHook>("the leaf"));
  hooked_accumulator()->add_post_hook(std::make_unique<PostHook>("the leaf"));
  auto y = x * parameter;
  y.register_hook([](const at::Tensor& grad) {
    see("first tensor hook");
    return grad + 0.5;
  });
  y.retain_grad();
  y.register_hook([](const at::Tensor& grad) {
    see("second tensor hook");
    return grad.tanh();
  });
  y.grad_fn()->add_pre_hook(std::make_unique<PreHook>("the product"));
  y.grad_fn()->add_post_hook(std::make_unique<PostHook>("the product"));
  hooked_leaf() = parameter;
  hooked_result() = y;
  return y;
}

TEST(EngineRules, HooksOfEveryKindRunInTheOrderOfTheLocalEngine) {
  Cluster cluster(2);
  const auto x = leaf();
  auto there = with_all_hooks(x);
  torch::autograd::backward({(there + there.sin()).sum()});
  const auto expected_order = take_seen();
  const auto expected_x = x.grad().clone(), expected_leaf = hooked_leaf().grad().clone(),
             expected_retained = hooked_result().grad().clone();
  ASSERT_EQ(expected_order.size(), 7u);
  x.mutable_grad() = at::Tensor();

  Context context;
  there = rpc_sync<with_all_hooks>("worker1", x);
  context.backward({(there + there.sin()).sum()});
  EXPECT_EQ(take_seen(), expected_order);
  EXPECT_TRUE(equal_gradients(context.gradient(x), expected_x));
  EXPECT_TRUE(equal_gradients(hooked_result().grad(), expected_retained));
  const WorkerScope scope(cluster[1]);
  EXPECT_TRUE(equal_gradients(dist_autograd::find_context(context.id()).gradient(hooked_leaf()),
                              expected_leaf));
  EXPECT_FALSE(hooked_leaf().grad().defined());
  hooked_leaf() = hooked_result() = at::Tensor();
  hooked_accumulator() = {};
}

struct Lengthen final : torch::autograd::FunctionPreHook {
  variable_list operator()(const variable_list&) override { return {at::ones({5}, at::kDouble)}; }
};

TEST(EngineRules, AHookThatGivesAnotherShapeIsAnErrorOfItsWorker) {
  Cluster cluster(2);
  Context context;
  const auto y = rpc_sync<times_parameter>("worker1", leaf());
  y.grad_fn()->add_pre_hook(std::make_unique<Lengthen>());
  const auto error = error_of([&] { context.backward({y.sum()}); });
  EXPECT_EQ(error.worker(), "worker0");
  EXPECT_NE(std::string(error.what()).find("a hook of a received tensor"), std::string::npos)
      << error.what();
}

// ---- inputs

TEST(EngineRules, InputsAreTheOnlyLeavesThatGetGradients) {
  Cluster cluster(3);
  Context context;
  const auto x = leaf(), w = leaf(2);
  const auto there = rpc_sync<via>("worker1", std::vector<std::string>{"worker2"}, x * w);
  const auto loss = (there * w).sum();
  context.backward({loss}, {.retain_graph = true, .inputs = {x}});
  const auto p = parameter_of(cluster[1]).detach(), q = parameter_of(cluster[2]).detach();
  EXPECT_TRUE(equal_gradients(context.gradient(x), (w * w).detach() * p * q));
  EXPECT_FALSE(context.gradient(w).defined());
  EXPECT_EQ(context.gradients().size(), 1u);
  EXPECT_FALSE(gradient_on(cluster[1], context.id()).defined());
  EXPECT_FALSE(gradient_on(cluster[2], context.id()).defined());
  // The same graph, all leaves: nothing was released that should not have been.
  context.backward({loss});
  EXPECT_TRUE(equal_gradients(context.gradient(x), 2 * (w * w).detach() * p * q));
  EXPECT_TRUE(equal_gradients(context.gradient(w), 2 * (x * w).detach() * p * q));
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[1], context.id()), (x * w * w).detach() * q));
}

TEST(EngineRules, NodesThatLeadToNoInputDoNotRun) {
  Cluster cluster(1);
  Context context;
  const auto x = leaf(), w = leaf(2);
  int hook_calls = 0;
  const auto trimmed = w.exp();
  trimmed.register_hook([&](const at::Tensor& grad) {
    ++hook_calls;
    return grad;
  });
  w.register_hook([&](const at::Tensor& grad) {
    ++hook_calls;
    return grad;
  });
  const auto other_root = w.exp().sum();
  const auto loss = (x.exp() * trimmed).sum();
  context.backward({loss, other_root, w}, {.grads = {{}, {}, ones()}, .inputs = {x}});
  EXPECT_EQ(hook_calls, 0);
  EXPECT_EQ(context.gradients().size(), 1u);
  EXPECT_TRUE(equal_gradients(context.gradient(x), (x.exp() * trimmed).detach()));
  // What trimmed nodes saved is still there, although the graph was not retained.
  context.backward({trimmed.sum(), other_root});
  EXPECT_TRUE(equal_gradients(context.gradient(w), 2 * w.exp().detach()));
  EXPECT_EQ(hook_calls, 2);
}

TEST(Inputs, MustBeLeavesThatRequireGradOfTheWorkerThatStartsThePass) {
  Cluster cluster(1);
  Context context;
  const auto x = leaf();
  const auto refusal = [&](std::vector<at::Tensor> inputs) {
    const auto error =
        error_of([&] { context.backward({x.sum()}, {.inputs = std::move(inputs)}); });
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return std::string(error.what());
  };
  EXPECT_EQ(refusal({x, at::Tensor()}), "input 1 is undefined");
  EXPECT_EQ(refusal({ones()}), "input 0 does not require grad");
  EXPECT_EQ(refusal({x * 2}),
            "input 0 is not a leaf: it is a result (of an operation or a call), which gets no "
            "gradient");
  const auto root = make_rref(x.sum());
  const auto error =
      error_of([&] { dist_autograd::backward_async(root, context, {.inputs = {x}}).get(); });
  EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument, "backward from an RRef cannot take"));
  context.backward({x.sum()});
  EXPECT_TRUE(equal_gradients(context.gradient(x), ones()));
}

// ---- nodes that run libtorch's engine inside

at::Tensor layer(const at::Tensor& x, const at::Tensor& p) { return (x * p).sin() * p; }

// Forgets what its forward computes and computes it again in backward, as checkpointing does.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x, at::Tensor p) {
    context->save_for_backward({x, p});
    return layer(x, p);
  }
  static variable_list backward(torch::autograd::AutogradContext* context, variable_list grads) {
    const at::AutoGradMode on(true);
    auto saved = context->get_saved_variables();
    const auto x = saved[0].detach().requires_grad_(), p = saved[1].detach().requires_grad_();
    return torch::autograd::grad({layer(x, p)}, {x, p}, {grads[0]});
  }
};
at::Tensor checkpointed(at::Tensor x) {
  return Checkpoint::apply(Checkpoint::apply(x, own_parameter()), own_parameter());
}

TEST(EngineRules, ANodeMayDifferentiateWhatItRecomputes) {
  Cluster cluster(2);
  const auto x = leaf();
  const auto p = parameter_of(cluster[1]);
  const auto expected = torch::autograd::grad({layer(layer(x, p), p).sum()}, {x, p});
  Context context;
  const auto loss = rpc_sync<checkpointed>("worker1", x).sum();
  context.backward({loss}, {.retain_graph = true});
  context.backward({loss});
  EXPECT_TRUE(equal_gradients(context.gradient(x), 2 * expected[0]));
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[1], context.id()), 2 * expected[1]));
  EXPECT_FALSE(p.grad().defined());
}

struct CallsBackward : torch::autograd::Function<CallsBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x * 2; }
  static variable_list backward(torch::autograd::AutogradContext*, variable_list grads) {
    const at::AutoGradMode on(true);
    (own_parameter() * 2).backward(grads[0]);
    return {grads[0] * 2};
  }
};
at::Tensor calls_backward(at::Tensor x) { return CallsBackward::apply(x); }
at::Tensor with_a_hook_that_calls_backward(at::Tensor x) {
  const auto y = x * own_parameter();
  y.register_hook([](const at::Tensor& gradient) {
    const at::AutoGradMode on(true);
    (own_parameter() * 2).sum().backward();
    return gradient;
  });
  return y;
}

TEST(EngineRules, BackwardInsideANodeOrHookIsAnErrorThatNamesGrad) {
  Cluster cluster(2);
  {
    Context context;
    const auto error =
        error_of([&] { context.backward({rpc_sync<calls_backward>("worker1", leaf()).sum()}); });
    EXPECT_TRUE(has_text(error, ErrorCode::remote_exception, "call torch::autograd::grad() there"));
    EXPECT_TRUE(has_text(error, ErrorCode::remote_exception, "CallsBackward"));
    EXPECT_EQ(error.worker(), "worker1");
  }
  {
    Context context;
    const auto error = error_of([&] {
      context.backward({rpc_sync<with_a_hook_that_calls_backward>("worker1", leaf()).sum()});
    });
    EXPECT_TRUE(has_text(error, ErrorCode::remote_exception, "call torch::autograd::grad() there"));
  }
  for (const bool on_a_leaf : {true, false}) {
    const auto x = leaf();
    Context context;
    const auto y = rpc_sync<times_parameter>("worker1", x);
    (on_a_leaf ? x : y).register_hook([](const at::Tensor& gradient) {
      const at::AutoGradMode on(true);
      (at::ones({1}).requires_grad_() * 2).backward();
      return gradient;
    });
    const auto error = error_of([&] { context.backward({y.sum()}); });
    EXPECT_TRUE(has_text(error, ErrorCode::remote_exception, "call torch::autograd::grad() there"));
  }
  const auto p = parameter_of(cluster[1]);
  p.mutable_grad() = at::Tensor();
}

// ---- modes of the thread

at::Tensor add_nan_in_backward(at::Tensor x) {
  return (at::zeros({3}, at::kDouble).requires_grad_().sqrt() * 0 + x) * 2;
}

struct Anomaly {
  explicit Anomaly(bool check_nan = true) {
    torch::autograd::AnomalyMode::set_enabled(true, check_nan);
  }
  ~Anomaly() { torch::autograd::AnomalyMode::set_enabled(false, true); }
};

TEST(EngineRules, NaNInAnomalyModeIsAnErrorOfTheWorkerThatMadeIt) {
  Cluster cluster(2);
  {
    Context context;  // without anomaly mode, NaN is a number like others
    context.backward({rpc_sync<add_nan_in_backward>("worker1", leaf()).sum()});
  }
  const Anomaly anomaly;
  Context context;
  const auto loss = rpc_sync<add_nan_in_backward>("worker1", leaf()).sum();
  const auto error = error_of([&] { context.backward({loss}); });
  EXPECT_EQ(error.worker(), "worker1");
  EXPECT_TRUE(has_text(error, ErrorCode::remote_exception,
                       "Function 'SqrtBackward0' returned nan values in its 0th output."));
}

struct ThrowsInBackward : torch::autograd::Function<ThrowsInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x * 2; }
  static variable_list backward(torch::autograd::AutogradContext*, variable_list) {
    throw std::runtime_error("no gradient today");
  }
};
at::Tensor throws_in_backward(at::Tensor x) { return ThrowsInBackward::apply(x) * 2; }

// What a pass through a call of Function prints, and whether it fails.
template <auto Function>
std::pair<std::string, bool> printed() {
  Context context;
  const auto loss = rpc_sync<Function>("worker1", leaf()).sum();
  bool failed = false;
  ::testing::internal::CaptureStderr();
  try {
    context.backward({loss});
  } catch (const Error&) {
    failed = true;
  }
  return {::testing::internal::GetCapturedStderr(), failed};
}

TEST(EngineRules, AnomalyModePrintsTheStackOfTheNodeThatFails) {
  Cluster cluster(2);
  const auto prints = [](const std::string& text, const std::string& node) {
    const auto at = text.find("Error detected in ");
    return at != std::string::npos && text.find(node, at) != std::string::npos;
  };
  {
    const Anomaly anomaly;
    ::testing::internal::CaptureStderr();  // of the local engine
    EXPECT_ANY_THROW(torch::autograd::backward({add_nan_in_backward(leaf()).sum()}));
    EXPECT_TRUE(prints(::testing::internal::GetCapturedStderr(), "SqrtBackward0"));
    const auto [text, failed] = printed<add_nan_in_backward>();
    EXPECT_TRUE(failed);
    EXPECT_TRUE(prints(text, "SqrtBackward0")) << text;
  }
  {
    const Anomaly anomaly(/*check_nan=*/false);
    const auto [nothing, nan_failed] = printed<add_nan_in_backward>();
    EXPECT_FALSE(nan_failed);
    EXPECT_FALSE(prints(nothing, "")) << nothing;
    const auto [text, failed] = printed<throws_in_backward>();
    EXPECT_TRUE(failed);
    EXPECT_TRUE(prints(text, "ThrowsInBackward")) << text;
  }
  const auto [text, failed] = printed<throws_in_backward>();
  EXPECT_TRUE(failed);
  EXPECT_FALSE(prints(text, "")) << text;
}

TEST(InferenceMode, CallsInItRecordNothingAndItsTensorsAreConstants) {
  Cluster cluster(2);
  Context context;
  const auto x = leaf();
  at::Tensor constant;
  {
    const c10::InferenceMode on;
    constant = ones() * 3;
    EXPECT_FALSE(rpc_sync<times_parameter>("worker1", x).requires_grad());
    EXPECT_EQ(count_on(cluster[0], "links"), 0);
  }
  ASSERT_TRUE(constant.is_inference());
  const auto loss = rpc_sync<times_parameter>("worker1", constant).sum();
  context.backward({loss});
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[1], context.id()), 3 * ones()));
}

TEST(EngineRules, BackwardRunsOutsideTheModesOfTheThreadThatCallsIt) {
  Cluster cluster(2);
  Context context;
  const auto x = leaf();
  const auto loss = rpc_sync<via>("worker1", std::vector<std::string>{"worker0"}, x).sum();
  const auto sum = x.sum();
  for (int pass = 0; pass < 3; ++pass) {
    const c10::InferenceMode on;
    context.backward({loss, sum, x}, {.retain_graph = true, .grads = {{}, {}, ones()}});
  }
  const auto gradient = context.gradient(x);
  EXPECT_TRUE(equal_gradients(
      gradient, 3 * (parameter_of(cluster[0]) * parameter_of(cluster[1])).detach() + 6));
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[0], context.id()),
                              3 * (x * parameter_of(cluster[1])).detach()));
}

// ---- views and work in place

std::vector<at::Tensor> change_what_came(at::Tensor a, at::Tensor b) {
  a.mul_(own_parameter());
  b.narrow(0, 1, 2).add_(a.narrow(0, 0, 2));
  return {a, b.narrow(0, 0, 2), a.t()};
}

at::Tensor change_results(std::vector<at::Tensor> results) {
  results[0].mul_(2);
  results[1].add_(results[0].narrow(0, 1, 2));
  return (results[0] * results[2]).sum() + results[1].sin().sum();
}

TEST(EngineRules, ViewsAndWorkInPlaceOnBothSidesOfACall) {
  Cluster cluster(2);
  const auto x = leaf();
  const auto arguments = [&] {
    const auto base = x.expand({2, 3}).contiguous() * 2;
    return std::vector<at::Tensor>{base.select(0, 1), base.narrow(1, 0, 3).select(0, 0)};
  };
  std::vector<at::Tensor> expected;
  {
    const WorkerScope scope(cluster[1]);
    auto in = arguments();
    auto out = change_what_came(in[0].clone(), in[1].clone());
    for (auto& each : out) each = each.clone();
    expected = torch::autograd::grad({change_results(out)}, {x, own_parameter()});
  }
  Context context;
  auto in = arguments();
  const auto out = rpc_sync<change_what_came>("worker1", in[0], in[1]);
  in[0].mul_(100);  // after the call: changes nothing there
  context.backward({change_results(out)});
  EXPECT_TRUE(equal_gradients(context.gradient(x), expected[0]));
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[1], context.id()), expected[1]));
}

// ---- dtypes

at::Tensor times_itself(at::Tensor x) { return x * x; }

TEST(EngineRules, GradientsHaveEveryFloatingAndComplexDtype) {
  Cluster cluster(2);
  for (const auto dtype :
       {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble}) {
    SCOPED_TRACE(c10::toString(dtype));
    const auto x = (at::arange(3, at::kDouble) / 4 + 1).to(dtype).requires_grad_();
    const auto seed = (at::arange(3, at::kDouble) + 1).to(dtype);
    const auto expected = torch::autograd::grad({times_itself(x) * x}, {x}, {seed})[0];
    Context context;
    context.backward({rpc_sync<times_itself>("worker1", x) * x}, {.grads = {seed}});
    const auto gradient = context.gradient(x);
    ASSERT_TRUE(gradient.defined());
    EXPECT_EQ(gradient.scalar_type(), dtype);
    EXPECT_TRUE(at::equal(gradient, expected)) << gradient << expected;
  }
}

at::Tensor complex_part(at::Tensor x) {
  return at::view_as_real(at::complex(x, x * 2) * at::complex(x.cos(), x)).to(at::kFloat);
}

TEST(EngineRules, GradientsCrossDtypesAndComplexViews) {
  Cluster cluster(2);
  const auto x = leaf();
  const auto expected = torch::autograd::grad({complex_part(x).sum()}, {x})[0];
  Context context;
  context.backward({rpc_sync<complex_part>("worker1", x).sum()});
  EXPECT_EQ(context.gradient(x).scalar_type(), at::kDouble);
  EXPECT_TRUE(equal_gradients(context.gradient(x), expected));
}

}  // namespace
}  // namespace stitch::testing::engine_rules_test
