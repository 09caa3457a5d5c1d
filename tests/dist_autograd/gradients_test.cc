// Gradients of every kind that cross the wire, against the local engine.
#include "stitch/dist_autograd/graph/tensor_bytes.h"
#include "stitch/dist_autograd/protocol/messages.h"
#include "stitch/dist_autograd/protocol/outbox.h"
#include "stitch/rpc/message/message.h"
#include "tests/dist_autograd/remote_parts.h"
#include "tests/support/blind_to_first.h"
#include "tests/support/oracle.h"
#include "tests/support/world_test.h"

namespace stitch::testing::gradients_test {
namespace {

using dist_autograd::Context;
using namespace std::chrono_literals;

rpc::InMessage arrive(rpc::OutMessage message) {
  message.frame.end_body();
  return rpc::InMessage(std::move(message.frame).finish(), WorkerInfo{});
}

at::Tensor look_up(at::Tensor table, at::Tensor rows) {
  return at::embedding(table, rows, -1, false, /*sparse=*/true);
}

TEST(Gradients, CrossTheWireSparse) {
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
                              rpc_sync<look_up>("worker2", table, more))});
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
                      table.sum()});
    EXPECT_TRUE(equal_gradients(context.gradient(table), expected.to_dense() + 1));
  }
}

at::Tensor sum_of(at::Tensor a, at::Tensor b) { return a + b; }

TEST(Gradients, OfSparseTensorsThatAreSentAreThoseOfOneProcess) {
  Cluster cluster(2);
  const auto sparse = [](std::int64_t column) {
    const auto indices = at::tensor({0L, 2L, 1L, column}, at::kLong).reshape({2, 2});
    return at::sparse_coo_tensor(indices, at::tensor({2.0, 3.0}, at::kDouble), {3, 4})
        .coalesce()
        .requires_grad_();
  };
  const auto a = sparse(1), b = sparse(3);
  const auto expected = torch::autograd::grad({at::_sparse_sum(sum_of(a, b))}, {a, b});
  Context context;
  context.backward({at::_sparse_sum(rpc_sync<sum_of>("worker1", a, b))});
  EXPECT_TRUE(context.gradient(a).is_sparse());
  EXPECT_TRUE(equal_gradients(context.gradient(a), expected[0]));
  EXPECT_TRUE(equal_gradients(context.gradient(b), expected[1]));
}

const at::Tensor& bags_table() {
  static const at::Tensor table = at::arange(40, at::kDouble).reshape({10, 4}).requires_grad_();
  return table;
}
at::Tensor look_up_bags(at::Tensor rows, at::Tensor offsets) {
  return std::get<0>(
      at::embedding_bag(bags_table(), rows, offsets, false, /*mode=*/0, /*sparse=*/true));
}

TEST(Gradients, OfAnEmbeddingBagAddUpSparselyOverPasses) {
  Cluster cluster(2);
  const auto rows = at::tensor({1, 3, 3, 9}, at::kLong), offsets = at::tensor({0, 2}, at::kLong);
  const auto expected =
      torch::autograd::grad({look_up_bags(rows, offsets).pow(2).sum()}, {bags_table()})[0];
  Context context;
  const auto loss = rpc_sync<look_up_bags>("worker1", rows, offsets).pow(2).sum();
  for (int pass = 0; pass < 2; ++pass) context.backward({loss}, {.retain_graph = true});
  const WorkerScope scope(cluster[1]);
  const auto gradient = dist_autograd::find_context(context.id()).gradient(bags_table());
  ASSERT_TRUE(gradient.defined());
  EXPECT_TRUE(gradient.is_sparse());
  EXPECT_TRUE(equal_gradients(gradient, 2 * expected.to_dense()));
}

at::Tensor in_place(at::Tensor x) {
  auto y = x * own_parameter().sum().to(x.scalar_type());
  y.mul_(2);
  y.narrow(0, 0, 1).add_(y.narrow(0, 1, 1));
  return y;
}

TEST(Gradients, HaveTheDtypeOfTheirTensorAlsoAfterWorkInPlace) {
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
    context.backward({real_sum(rpc_sync<in_place>("worker1", x))});
    const auto gradient = context.gradient(x);
    ASSERT_TRUE(gradient.defined());
    EXPECT_EQ(gradient.scalar_type(), dtype);
    EXPECT_TRUE(at::allclose(gradient, expected)) << c10::toString(dtype);
  }
}

at::Tensor blind_to_first(at::Tensor a, at::Tensor b) { return BlindToFirst::apply(a, b); }

TEST(Gradients, ThatAreUndefinedStayUndefinedOverTheWire) {
  Cluster cluster(2);
  Context context;
  const auto a = ones().requires_grad_(), b = ones().requires_grad_();
  context.backward({rpc_sync<blind_to_first>("worker1", a, b * 2).sum()});
  EXPECT_FALSE(context.gradient(a).defined());
  EXPECT_TRUE(equal_gradients(context.gradient(b), 2 * ones()));
}

// Twice x. Libtorch makes zeros of an undefined gradient before it gets here.
std::atomic<int> doubled_backward{0};
struct Doubled : torch::autograd::Function<Doubled> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list grads) {
    ++doubled_backward;
    return {grads[0] * 2};
  }
};
std::atomic<int> hooks_there{0};
std::vector<at::Tensor> first_and_doubled(at::Tensor a, at::Tensor b) {
  for (const at::Tensor& each : {a, b}) {
    each.register_hook([](const at::Tensor& gradient) {
      ++hooks_there;
      return gradient * 3;  // throws for an undefined one
    });
  }
  return {a * a, Doubled::apply(b)};
}
std::vector<at::Tensor> first_and_doubled_there(at::Tensor a, at::Tensor b) {
  return rpc_sync<first_and_doubled>("worker2", a * 1, Doubled::apply(b));
}

// As in one process: what is behind a tensor that the loss does not use is not run, whatever came
// in the same message.
TEST(Gradients, DoNotPassThroughTensorsThatTheLossDoesNotUse) {
  Cluster cluster(3);
  const auto a = ones().requires_grad_(), b = ones().requires_grad_(), c = ones().requires_grad_();
  for (const bool uses_all : {false, true}) {
    doubled_backward = hooks_there = 0;
    Context context;
    const auto results = rpc_sync<first_and_doubled_there>("worker1", a * 1, Doubled::apply(b));
    int hooks_here = 0;
    for (const at::Tensor& result : results) {
      result.register_hook([&hooks_here](const at::Tensor& gradient) {
        ++hooks_here;
        return gradient * 1;
      });
    }
    auto loss = (results.at(0) * c).sum();
    if (uses_all) loss = loss + results.at(1).sum();
    context.backward({loss});
    EXPECT_EQ(doubled_backward, uses_all ? 3 : 0);
    EXPECT_EQ(hooks_there, uses_all ? 2 : 1);
    EXPECT_EQ(hooks_here, uses_all ? 2 : 1);
    EXPECT_TRUE(equal_gradients(context.gradient(a), 6 * ones()));
    EXPECT_TRUE(equal_gradients(context.gradient(c), ones()));
    EXPECT_EQ(context.gradient(b).defined(), uses_all);
    EXPECT_EQ(context.gradients().size(), uses_all ? 3u : 2u);
    if (uses_all) {
      EXPECT_TRUE(equal_gradients(context.gradient(b), 24 * ones()));
    }
  }
}

// The used tensor of a message may be one that has no gradient in the end.
TEST(Gradients, PassThroughWhatTheLossUsesWithoutAGradient) {
  Cluster cluster(2);
  const auto a = ones().requires_grad_(), b = ones().requires_grad_();
  doubled_backward = 0;
  Context context;
  context.backward({rpc_sync<blind_to_first>("worker1", Doubled::apply(a), b).sum()});
  EXPECT_EQ(doubled_backward, 1);
  EXPECT_TRUE(context.gradient(a).defined());  // the zeros that libtorch makes
  EXPECT_TRUE(equal_gradients(context.gradient(a), 0 * ones()));
}

std::vector<at::Tensor> five_parts(at::Tensor x) { return (x * 2).chunk(5); }

TEST(Gradients, OfResultsThatTheLossDoesNotUseAreZero) {
  Cluster cluster(2);
  const auto x = at::arange(1, 11, at::kDouble).requires_grad_();
  const auto loss_of = [](const std::vector<at::Tensor>& parts) {
    return (parts.at(0) * parts.at(2) * parts.at(4)).sum();
  };
  const auto expected = torch::autograd::grad({loss_of(five_parts(x))}, {x})[0];
  Context context;
  context.backward({loss_of(rpc_sync<five_parts>("worker1", x))});
  const auto gradient = context.gradient(x);
  ASSERT_TRUE(gradient.defined());
  EXPECT_TRUE(equal_gradients(gradient, expected));
  EXPECT_EQ(gradient.slice(0, 2, 4).abs().sum().item<double>(), 0);
}

TEST(GradientEntries, TakeOneBitForEachUndefinedGradient) {
  const auto bytes_of = [](const dist_autograd::wire::GradientEntry& entry) {
    rpc::OutMessage message(dist_autograd::wire::kGradients);
    const std::size_t before = message.frame.body().size();
    rpc::OutArchive archive(message);
    archive(entry);
    return message.frame.body().size() - before;
  };
  dist_autograd::wire::GradientEntry entry;
  entry.count = 800;
  const std::size_t without = bytes_of(entry);
  EXPECT_EQ(without, 36U);
  for (std::uint32_t i = 0; i < entry.count; ++i) {
    entry.add_undefined(i, true);
    EXPECT_EQ(bytes_of(entry), without + i / 8 + 1);
  }
  // Of those on which the loss depends all the same, another bit.
  for (std::uint32_t i = 0; i < entry.count; ++i) {
    EXPECT_TRUE(entry.is_unreached(i));
    entry.add_undefined(i, false);
    EXPECT_FALSE(entry.is_unreached(i));
    EXPECT_EQ(bytes_of(entry), without + (entry.count + i) / 8 + 1);
  }
}

TEST(Outboxes, AreFullOfSparseGradientsAsOfDenseOnes) {
  const auto node = dist_autograd::make_node<dist_autograd::RecvNode>(
      dist_autograd::LinkId{WorkerId(1), 1}, WorkerInfo{"worker1", WorkerId(1), 1},
      dist_autograd::ContextId{WorkerId(0), 1, 1}, dist_autograd::LinkName{});
  const auto rows = at::arange(64), values = at::ones({64, 1024}, at::kFloat);
  const auto sparse = at::sparse_coo_tensor(rows.unsqueeze(0), values, {1000, 1024});
  dist_autograd::Outbox outbox;
  outbox.add(*node, {sparse, at::Tensor()}, {}, dist_autograd::bytes_of({sparse, at::Tensor()}), 0,
             {});
  EXPECT_EQ(outbox.bytes(), rows.nbytes() + values.nbytes());
  EXPECT_TRUE(outbox.due());
  const auto batches = outbox.take();
  ASSERT_EQ(batches.size(), 1U);
  EXPECT_EQ(batches[0].tensors.size(), 1U);
  EXPECT_TRUE(batches[0].entries.at(0).undefined.has(1));
  EXPECT_EQ(outbox.bytes(), 0U);
}

TEST(GradientEntries, NameOnlyPositionsOfTheirOwnTensors) {
  using dist_autograd::Positions;
  const Positions none, some{0, 9, 3, 64};
  EXPECT_TRUE(none.empty());
  EXPECT_TRUE(none.below(0));
  EXPECT_FALSE(some.empty());
  for (std::uint32_t i = 0; i < 100; ++i) {
    EXPECT_EQ(some.has(i), i == 0 || i == 3 || i == 9 || i == 64) << i;
    EXPECT_EQ(some.below(i), i > 64) << i;
    EXPECT_EQ(Positions{i}.below(i), false) << i;
    EXPECT_EQ(Positions{i}.below(i + 1), true) << i;
  }
  EXPECT_FALSE(none.has(0xffffffff));
  // What a peer may send.
  for (const auto& bytes : {std::vector<std::uint8_t>{0}, {1, 0}, {255, 255, 0}}) {
    rpc::OutMessage message(dist_autograd::wire::kGradients);
    rpc::OutArchive writer(message);
    writer(bytes);
    rpc::InMessage arrived = arrive(std::move(message));
    rpc::InArchive archive(arrived, arrived.view.body());
    Positions read;
    archive(read);
    EXPECT_FALSE(read.below(1000)) << "it ends with a superfluous byte";
  }
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

TEST(Gradients, PassTheHooksOfNodesOnEveryWorkerOnce) {
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
  context.backward({(y + y * y).sum()});
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

TEST(Gradients, PassHooksOfTensorsThatHaveNoCurrentContext) {
  Cluster cluster(2);
  context_in_hook = false;
  Context context;
  const auto x = ones().requires_grad_();
  const auto y = rpc_sync<with_a_tensor_hook>("worker1", x);
  context.backward({y.sum()});
  EXPECT_TRUE(equal_gradients(context.gradient(x), 2 * parameter_of(cluster[1])));
  EXPECT_FALSE(context_in_hook);
}

TEST(Gradients, AreKeptInGradWhereATensorThatCameInWasAskedTo) {
  Cluster cluster(2);
  Context context;
  const auto x = ones().requires_grad_();
  auto y = rpc_sync<times_parameter>("worker1", x);
  y.retain_grad();
  context.backward({(y * y).sum()});
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

TEST(GradientsOfPasses, MadeAThousandTimesOverOneGraphAddUp) {
  constexpr int kPasses = 1000;
  Cluster cluster(2);
  Context context;
  const auto x = ones().requires_grad_();
  const auto loss = rpc_sync<times_parameter>("worker1", x).sum();
  for (int i = 0; i < kPasses; ++i) context.backward({loss}, {.retain_graph = true});
  EXPECT_TRUE(equal_gradients(context.gradient(x), kPasses * parameter_of(cluster[1]).detach()));
  EXPECT_TRUE(equal_gradients(gradient_on(cluster[1], context.id()), kPasses * ones()));
  EXPECT_TRUE(eventually(
      [&] { return count_on(cluster[0], "passes") == 0 && count_on(cluster[1], "passes") == 0; }));
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
  Cluster cluster(2, {.num_threads = 3});
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

// A module on another worker.
struct Layers : torch::nn::Module {
  Layers()
      : inner(register_module("inner", torch::nn::Linear(3, 4))),
        outer(register_module("outer", torch::nn::Linear(4, 2))) {
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x) { return outer(inner(x).tanh()); }
  torch::nn::Linear inner, outer;
};
at::Tensor gradient_of(RRef<at::Tensor> parameter) {
  return dist_autograd::current_context().gradient(parameter.local_value());
}
Future<at::Tensor> through_a_coroutine(RemoteModule<Layers> layers, at::Tensor x) {
  const at::Tensor y = co_await layers.forward_async(x);
  const at::Tensor again = at::cat({y, y}).narrow(0, 0, 3);  // apart: g++ 12
  const at::Tensor z = co_await layers.forward_async(again);
  co_return z* own_parameter().sum();
}

TEST(Gradients, ReachTheParametersOfRemoteModulesHoweverTheyAreCalled) {
  Cluster cluster(3);
  const RemoteModule<Layers> remote_layers("worker1");
  const auto state = remote_layers.state_dict();
  Layers layers;
  static_cast<void>(rref::load_module_state(layers, state, true));
  const auto x = ones().requires_grad_();
  // In one process.
  const auto factor = parameter_of(cluster[2]).detach().sum();
  const auto y = layers.forward(x);
  const auto loss_here = y.sum() + layers.forward(x * 2).sin().sum() +
                         (layers.forward(at::cat({y, y}).narrow(0, 0, 3)) * factor).sum();
  auto leaves = layers.parameters();
  leaves.push_back(x);
  const auto expected = torch::autograd::grad({loss_here}, leaves);

  Context context;
  auto plain = remote_layers.forward_async(x);
  auto continued =
      remote_layers.forward_async(x * 2).then([](at::Tensor there) { return there.sin(); });
  auto coroutine = rpc_async<through_a_coroutine>("worker2", remote_layers, x);
  const auto loss = plain.get().sum() + continued.get().sum() + coroutine.get().sum();
  context.backward({loss});
  EXPECT_TRUE(equal_gradients(context.gradient(x), expected.back()));
  const auto parameters = remote_layers.parameters();
  ASSERT_EQ(parameters.size() + 1, expected.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(equal_gradients(rpc_sync<gradient_of>("worker1", parameters[i]), expected[i])) << i;
  }
}

}  // namespace
}  // namespace stitch::testing::gradients_test
