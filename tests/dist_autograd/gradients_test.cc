// Gradients of every kind that cross the wire, against the local engine.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <mutex>
#include <set>

#include "stitch/dist_autograd/context.h"
#include "tests/dist_autograd/remote_parts.h"
#include "tests/support/blind_to_first.h"
#include "tests/support/oracle.h"

namespace stitch::testing {
namespace {

using dist_autograd::Context;
using dist_autograd::Mode;
using namespace std::chrono_literals;

class Gradients : public ::testing::TestWithParam<Mode> {};

INSTANTIATE_TEST_SUITE_P(Modes, Gradients, ::testing::Values(Mode::exact, Mode::fast),
                         [](const auto& info) {
                           return info.param == Mode::exact ? "Exact" : "Fast";
                         });

at::Tensor look_up(at::Tensor table, at::Tensor rows) {
  return at::embedding(table, rows, -1, false, /*sparse=*/true);
}

TEST_P(Gradients, CrossTheWireSparse) {
  Cluster cluster(3);
  const auto table = at::rand({100, 4}, at::kDouble).requires_grad_();
  const auto rows = at::tensor({3, 7, 3}), more = at::tensor({7, 99});
  const auto loss_of = [](const at::Tensor& a, const at::Tensor& b) {
    return (a * a).sum() + 3 * b.sum();
  };
  const auto expected =
      torch::autograd::grad({loss_of(look_up(table, rows), look_up(table, more))}, {table})[0];
  {
    Context context;
    context.backward({loss_of(rpc_sync<look_up>("worker1", table, rows),
                              rpc_sync<look_up>("worker2", table, more))},
                     {.mode = GetParam()});
    const auto gradient = context.gradient(table);
    ASSERT_TRUE(gradient.defined());
    EXPECT_TRUE(gradient.is_sparse());
    EXPECT_TRUE(equal_gradients(gradient, expected));
  }
  {
    // With a dense one for the same leaf.
    Context context;
    context.backward({loss_of(rpc_sync<look_up>("worker1", table, rows),
                              rpc_sync<look_up>("worker2", table, more)) +
                      table.sum()},
                     {.mode = GetParam()});
    EXPECT_TRUE(equal_gradients(context.gradient(table), expected.to_dense() + 1));
  }
}

at::Tensor in_place(at::Tensor x) {
  auto y = x * own_parameter().sum().to(x.scalar_type());
  y.mul_(2);
  y.narrow(0, 0, 1).add_(y.narrow(0, 1, 1));
  return y;
}

TEST_P(Gradients, HaveTheDtypeOfTheirTensorAlsoAfterWorkInPlace) {
  Cluster cluster(2);
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kComplexDouble}) {
    const auto x = at::ones({3}, dtype).requires_grad_();
    const auto real_sum = [](const at::Tensor& y) {
      auto z = y * y;
      z.add_(y);
      return (z.is_complex() ? at::real(z) : z).sum();
    };
    at::Tensor expected;
    {
      const WorkerScope scope(cluster[1]);
      expected = torch::autograd::grad({real_sum(in_place(x))}, {x})[0];
    }
    Context context;
    context.backward({real_sum(rpc_sync<in_place>("worker1", x))}, {.mode = GetParam()});
    const auto gradient = context.gradient(x);
    ASSERT_TRUE(gradient.defined());
    EXPECT_EQ(gradient.scalar_type(), dtype);
    EXPECT_TRUE(at::allclose(gradient, expected)) << c10::toString(dtype);
  }
}

at::Tensor blind_to_first(at::Tensor a, at::Tensor b) { return BlindToFirst::apply(a, b); }

TEST_P(Gradients, ThatAreUndefinedStayUndefinedOverTheWire) {
  Cluster cluster(2);
  Context context;
  const auto a = ones().requires_grad_(), b = ones().requires_grad_();
  context.backward({rpc_sync<blind_to_first>("worker1", a, b * 2).sum()}, {.mode = GetParam()});
  EXPECT_FALSE(context.gradient(a).defined());
  EXPECT_TRUE(equal_gradients(context.gradient(b), 2 * ones()));
}

// Hooks of a node that scale what passes, and count.
std::atomic<int> pre_hooks{0}, post_hooks{0};
struct Triple final : torch::autograd::FunctionPreHook {
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    ++pre_hooks;
    return {grads[0] * 3};
  }
};
struct Halve final : torch::autograd::FunctionPostHook {
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    ++post_hooks;
    auto halved = outputs;
    for (auto& each : halved) {
      if (each.defined()) each = each / 2;
    }
    return halved;
  }
};
at::Tensor hooked(at::Tensor x) {
  const auto y = x * own_parameter();
  y.grad_fn()->add_pre_hook(std::make_unique<Triple>());
  y.grad_fn()->add_post_hook(std::make_unique<Halve>());
  return y.sin();
}

TEST_P(Gradients, PassTheHooksOfNodesOnEveryWorkerOnce) {
  Cluster cluster(2);
  const auto x = ones().requires_grad_();
  std::vector<at::Tensor> expected;
  {
    const WorkerScope scope(cluster[1]);
    const auto y = hooked(x);
    y.grad_fn()->add_pre_hook(std::make_unique<Triple>());
    expected = torch::autograd::grad({(y + y * y).sum()}, {x, own_parameter()});
  }
  pre_hooks = post_hooks = 0;
  Context context;
  const auto y = rpc_sync<hooked>("worker1", x);
  y.grad_fn()->add_pre_hook(std::make_unique<Triple>());  // of the node where it came in
  context.backward({(y + y * y).sum()}, {.mode = GetParam()});
  EXPECT_EQ(pre_hooks, 2);
  EXPECT_EQ(post_hooks, 1);
  EXPECT_TRUE(equal_gradients(context.gradient(x), expected[0]));
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[1], context.id()), expected[1]));
}

std::atomic<bool> context_in_hook{false};
at::Tensor with_a_tensor_hook(at::Tensor x) {
  const auto y = x * own_parameter();
  y.register_hook([](const at::Tensor& grad) {
    if (dist_autograd::has_current_context()) context_in_hook = true;
    return grad * 2;
  });
  return y;
}

TEST_P(Gradients, PassHooksOfTensorsThatHaveNoCurrentContext) {
  Cluster cluster(2);
  context_in_hook = false;
  Context context;
  const auto x = ones().requires_grad_();
  const auto y = rpc_sync<with_a_tensor_hook>("worker1", x);
  context.backward({y.sum()}, {.mode = GetParam()});
  EXPECT_TRUE(equal_gradients(context.gradient(x), 2 * parameter_of(cluster[1])));
  EXPECT_FALSE(context_in_hook);
}

TEST_P(Gradients, AreKeptInGradWhereATensorThatCameInWasAskedTo) {
  Cluster cluster(2);
  Context context;
  const auto x = ones().requires_grad_();
  auto y = rpc_sync<times_parameter>("worker1", x);
  y.retain_grad();
  context.backward({(y * y).sum()}, {.mode = GetParam()});
  EXPECT_TRUE(equal_gradients(y.grad(), 2 * y));
  EXPECT_FALSE(x.grad().defined());
  EXPECT_TRUE(equal_gradients(context.gradient(x), 2 * y * parameter_of(cluster[1])));
}

bool backward_often(at::Tensor x, int times) {
  const auto loss = rpc_sync<times_parameter>("worker2", x * own_parameter()).sum();
  for (int i = 0; i < times; ++i)
    dist_autograd::current_context().backward({loss}, {.retain_graph = true});
  return true;
}

TEST(GradientsOfPasses, FromTwoWorkersAtOnceAddUp) {
  constexpr int kTimes = 25;
  Cluster cluster(3);
  const auto p = parameter_of(cluster[1]).detach(), q = parameter_of(cluster[2]).detach();
  Context context;
  const auto x = ones().requires_grad_();
  const auto loss = rpc_sync<via>("worker1", std::vector<std::string>{"worker2"}, x).sum();
  const auto there = rpc_async<backward_often>("worker1", x, kTimes);
  for (int i = 0; i < kTimes; ++i) context.backward({loss}, {.retain_graph = true});
  EXPECT_TRUE(there.get());
  EXPECT_TRUE(equal_gradients(context.gradient(x), 2 * kTimes * p * q));
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[1], context.id()), 2 * kTimes * q));
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[2], context.id()), 2 * kTimes * p));
}

// The number of nodes of this kind that run at the same time; waits for `wanted`.
std::atomic<int> inside{0}, most_inside{0}, wanted{0};
struct Counted : torch::autograd::Function<Counted> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x * 1; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list grads) {
    const int now = ++inside;
    int most = most_inside;
    while (most < now && !most_inside.compare_exchange_weak(most, now)) {
    }
    if (wanted > 1) {
      static_cast<void>(eventually([] { return most_inside >= wanted; }));
    } else {
      std::this_thread::sleep_for(2ms);
    }
    --inside;
    return grads;
  }
};
at::Tensor counted_branches(at::Tensor x, int branches) {
  at::Tensor sum = x * 0;
  for (int i = 0; i < branches; ++i) sum = sum + Counted::apply(x * own_parameter());
  return sum;
}

TEST(GradientsOfPasses, AreMadeSideBySideWhileNodesOfOnePassRunOneAtATime) {
  Cluster cluster(2, [](Options& options) { options.num_threads = 3; });
  inside = most_inside = 0;
  wanted = 1;
  {
    Context context;
    context.backward({rpc_sync<counted_branches>("worker1", ones(), 8).sum()});
    EXPECT_EQ(most_inside, 1);
  }
  most_inside = 0;
  wanted = 2;
  Context first;
  const auto a = rpc_sync<counted_branches>("worker1", ones(), 1).sum();
  Context second;
  const auto b = rpc_sync<counted_branches>("worker1", ones(), 1).sum();
  const auto one = first.backward_async({a}), other = second.backward_async({b});
  one.get();
  other.get();
  EXPECT_EQ(most_inside, 2);
}

}  // namespace
}  // namespace stitch::testing
