#include <new>

#include "stitch/dist_autograd/executor/strand.h"
#include "tests/dist_autograd/local_world.h"
#include "tests/support/world_test.h"

namespace stitch::dist_autograd::testing::strand_test {
namespace {

at::Tensor leaf(at::IntArrayRef shape, int seed = 1) {
  torch::manual_seed(static_cast<std::uint64_t>(seed));
  return torch::randn(shape, torch::dtype(torch::kFloat64)).requires_grad_();
}

TEST(Strand, GivesTheGradientsOfTheLocalEngineForALocalGraph) {
  LocalWorld world(1);
  const auto w = leaf({4, 3}, 1), b = leaf({3}, 2), x = leaf({5, 4}, 3);
  const auto hidden = at::tanh(at::matmul(x, w) + b);
  const auto loss = (hidden * hidden).sum() + hidden.mean();
  const auto expected = stock_gradients({loss}, {w, b, x});
  const auto outcome = world.backward({.roots = {loss}});
  ASSERT_FALSE(outcome.error) << outcome.error->what();
  EXPECT_TRUE(same_gradient(world.gradient(w), expected[0]));
  EXPECT_TRUE(same_gradient(world.gradient(b), expected[1]));
  EXPECT_TRUE(same_gradient(world.gradient(x), expected[2]));
  EXPECT_FALSE(w.grad().defined());
  EXPECT_FALSE(x.grad().defined());
}

TEST(Strand, GivesTheSameGradientsForAGraphThatIsCutBackAndForth) {
  LocalWorld world(2);
  const auto x = leaf({3, 3}, 1), p = leaf({3, 3}, 2);
  const auto program = [&](auto&& to_peer, auto&& back) {
    const auto there = to_peer(x * 2);
    const auto y = back(at::matmul(there, p).sin());
    const auto again = to_peer(y + x);
    return (back(again * p) + y).sum();
  };
  const auto same = [](const at::Tensor& t) { return t; };
  const auto expected = stock_gradients({program(same, same)}, {x, p});
  const auto loss = program([&](const at::Tensor& t) { return world.cut(t, 0); },
                            [&](const at::Tensor& t) { return world.cut(t, 1); });
  const auto outcome = world.backward({.roots = {loss}});
  ASSERT_FALSE(outcome.error) << outcome.error->what();
  EXPECT_EQ(outcome.gradients_sent, 4u);
  EXPECT_TRUE(same_gradient(world.gradient(x, 0), expected[0]));
  EXPECT_TRUE(same_gradient(world.gradient(p, 1), expected[1]));
}

TEST(Strand, DoesNotRunWhatTheLossDoesNotUse) {
  LocalWorld world(2);
  const auto x = leaf({4}), p = leaf({4}, 2);
  const auto used = world.cut(world.cut(x * 2, 0) * p, 1);
  const auto unused = world.cut(world.cut(x.exp(), 0).sin() * p, 1);
  const auto outcome = world.backward({.roots = {used.sum()}});
  ASSERT_FALSE(outcome.error);
  EXPECT_EQ(outcome.gradients_sent, 2u);
  EXPECT_TRUE(same_gradient(world.gradient(x, 0), 2 * p.detach()));
  EXPECT_TRUE(unused.requires_grad());
}

TEST(Strand, RunsEachNodeOnceWhereManyPathsMeet) {
  LocalWorld world(2);
  const auto x = leaf({2});
  std::atomic<int> calls{0};
  const auto shared = x * 3;
  shared.register_hook([&calls](at::Tensor g) {
    ++calls;
    return g;
  });
  const auto a = world.cut(shared, 0), b = world.cut(shared.sin(), 0),
             c = world.cut(shared.cos(), 0);
  const auto loss = world.cut((a * b * c).sum(), 1);
  const auto expected = stock_gradients({((x * 3) * (x * 3).sin() * (x * 3).cos()).sum()}, {x});
  const auto outcome = world.backward({.roots = {loss}});
  ASSERT_FALSE(outcome.error);
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(same_gradient(world.gradient(x), expected[0]));
}

TEST(Strand, CallsALeafHookOnceWithTheWholeSumAndUsesWhatItReturns) {
  LocalWorld world(1);
  const auto x = leaf({3});
  int calls = 0;
  x.register_hook([&calls](at::Tensor g) {
    ++calls;
    return g.clamp_max(2.5);
  });
  world.backward({.roots = {(x * 2 + x).sum()}});
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(same_gradient(world.gradient(x), at::full({3}, 2.5, at::kDouble)));
}

TEST(Strand, RunsHooksOnReceivedTensorsBeforeTheirGradientLeaves) {
  LocalWorld world(2);
  const auto x = leaf({3});
  auto received = world.cut(x * 1, 0);
  received.register_hook([](at::Tensor g) { return g * 10; });
  world.backward({.part = 1, .roots = {received.sum()}});
  EXPECT_TRUE(same_gradient(world.gradient(x, 0), at::full({3}, 10.0, at::kDouble)));
}

TEST(Strand, AcceptsALeafAsRootAndSeveralRootsMeetingInOneNode) {
  LocalWorld world(1);
  const auto x = leaf({3});
  const auto y = x * 2;
  world.backward({.roots = {x, y, y},
                  .seeds = {at::ones({3}, at::kDouble), at::ones({3}, at::kDouble),
                            at::full({3}, 5.0, at::kDouble)}});
  EXPECT_TRUE(same_gradient(world.gradient(x), at::full({3}, 13.0, at::kDouble)));
}

TEST(Strand, RunsARootThatAnotherRootAlsoReaches) {
  LocalWorld world(1);
  const auto x = leaf({3});
  const auto y = x * 2, z = (y * y).sum();
  const auto expected = stock_gradients({z, y}, {x}, {at::Tensor(), at::ones({3}, at::kDouble)});
  world.backward({.roots = {z, y}});
  EXPECT_TRUE(same_gradient(world.gradient(x), expected[0]));
}

TEST(Strand, AddsUpAcrossPassesAndLeavesEarlierSnapshotsAlone) {
  LocalWorld world(1);
  const auto x = leaf({3});
  const auto loss = (x * x).sum();
  world.backward({.roots = {loss}, .flags = {.retain_graph = true}});
  const auto first = world.gradient(x);
  const auto copy = first.clone();
  world.backward({.roots = {loss}, .flags = {.retain_graph = true}});
  EXPECT_TRUE(same_gradient(first, copy));
  EXPECT_TRUE(same_gradient(world.gradient(x), 2 * copy));
}

TEST(Strand, SaysThatSavedTensorsAreGoneInASecondPassWithoutRetainGraph) {
  LocalWorld world(1);
  const auto x = leaf({3});
  const auto loss = (x * x).sum();
  ASSERT_FALSE(world.backward({.roots = {loss}}).error);
  const auto outcome = world.backward({.roots = {loss}});
  ASSERT_TRUE(outcome.error);
  EXPECT_NE(std::string(outcome.error->what()).find("second time"), std::string::npos)
      << outcome.error->what();
  EXPECT_NE(std::string(outcome.error->what()).find("MulBackward0"), std::string::npos)
      << outcome.error->what();
}

TEST(Strand, MakesGradientsThatCanBeDifferentiatedAgain) {
  LocalWorld world(1);
  const auto x = leaf({3});
  const auto loss = (x * x * x).sum();
  world.backward({.roots = {loss}, .flags = {.retain_graph = true, .create_graph = true}});
  const auto first = world.gradient(x);
  ASSERT_TRUE(first.requires_grad());
  const auto expected_first = stock_gradients({loss}, {x}, {}, true, true)[0];
  EXPECT_TRUE(same_gradient(first, expected_first));
  EXPECT_TRUE(same_gradient(stock_gradients({first.sum()}, {x})[0],
                            stock_gradients({expected_first.sum()}, {x})[0]));
  world.gradients(0).clear();
}

TEST(Strand, AddsSparseGradientsSparselyAndDenseOnesOnTop) {
  LocalWorld world(1);
  const auto table = leaf({10, 2});
  const auto rows = torch::tensor({1, 3, 3}, torch::kLong);
  const auto looked_up = [&] {
    return torch::embedding(table, rows, -1, false, /*sparse=*/true).sum();
  };
  const auto once = stock_gradients({looked_up()}, {table})[0];
  world.backward({.roots = {looked_up()}});
  EXPECT_TRUE(world.gradient(table).is_sparse());
  EXPECT_TRUE(same_gradient(world.gradient(table), once));
  world.backward({.roots = {looked_up()}});
  EXPECT_TRUE(world.gradient(table).is_sparse());
  EXPECT_TRUE(same_gradient(world.gradient(table), once + once));
  world.backward({.roots = {(table * 2).sum()}});
  EXPECT_TRUE(same_gradient(world.gradient(table), (once + once).to_dense() + 2));
}

TEST(Strand, AddsSparseAndDenseGradientsThatMeetInOnePass) {
  LocalWorld world(1);
  const auto table = leaf({6, 2});
  const auto doubled = table * 1;
  const auto rows = torch::tensor({0, 5}, torch::kLong);
  const auto loss = torch::embedding(table, rows, -1, false, true).sum() + doubled.sin().sum() +
                    torch::embedding(table, rows, -1, false, true).sum();
  const auto expected = stock_gradients({loss}, {table})[0];
  world.backward({.roots = {loss}});
  EXPECT_TRUE(same_gradient(world.gradient(table), expected));
}

// Gives no gradient to its first input and a real one to its second.
struct HalfBlind : torch::autograd::Function<HalfBlind> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext*, at::Tensor a,
                                                at::Tensor b) {
    return {a + b};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list grads) {
    return {at::Tensor(), grads[0]};
  }
};

TEST(Strand, PassesUndefinedGradientsOnWithoutLosingCount) {
  LocalWorld world(2);
  const auto x = leaf({3}), y = leaf({3}, 2);
  const auto a = world.cut(x.exp(), 0), b = world.cut(y.exp(), 0);
  const auto outcome = world.backward({.part = 1, .roots = {HalfBlind::apply(a, b)[0].sum()}});
  ASSERT_FALSE(outcome.error) << outcome.error->what();
  EXPECT_EQ(outcome.gradients_sent, 2u);
  EXPECT_FALSE(world.gradient(x).defined());
  EXPECT_TRUE(same_gradient(world.gradient(y), y.exp().detach()));
}

// Differentiates inside its backward what it recomputes, as checkpointing does.
struct Nested : torch::autograd::Function<Nested> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x) {
    context->save_for_backward({x});
    return x.sin();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const at::AutoGradMode on(true);
    auto x = context->get_saved_variables()[0].detach().requires_grad_();
    return torch::autograd::grad({x.sin()}, {x}, {grads[0]});
  }
};

TEST(Strand, AllowsANodeToRunTheLocalEngineInside) {
  LocalWorld world(1);
  const auto x = leaf({3});
  const auto outcome = world.backward({.roots = {Nested::apply(x * 2).sum()}});
  ASSERT_FALSE(outcome.error) << outcome.error->what();
  EXPECT_TRUE(same_gradient(world.gradient(x), stock_gradients({(x * 2).sin().sum()}, {x})[0]));
}

struct Throws : torch::autograd::Function<Throws> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x * 1; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw std::runtime_error("no gradient today");
  }
};

TEST(Strand, StopsEverywhereWhenANodeThrowsAndNamesIt) {
  for (const int thrower : {0, 1, 2}) {
    LocalWorld world(3);
    at::Tensor value = leaf({3});
    for (int part = 0; part < 3; ++part) {
      value = value * 2;
      if (part == thrower) value = Throws::apply(value);
      if (part < 2) value = world.cut(value, part);
    }
    const auto outcome = world.backward({.part = 2, .roots = {value.sum()}});
    ASSERT_TRUE(outcome.error);
    EXPECT_EQ(outcome.error->code(), ErrorCode::remote_exception);
    EXPECT_NE(std::string(outcome.error->what()).find("no gradient today"), std::string::npos)
        << outcome.error->what();
    EXPECT_NE(std::string(outcome.error->what()).find("Throws"), std::string::npos)
        << outcome.error->what();
  }
}

TEST(Strand, ReportsNaNInAnomalyMode) {
  LocalWorld world(1);
  const auto x = torch::zeros({2}, torch::dtype(torch::kFloat64)).requires_grad_();
  const auto loss = (x.sqrt() * 0).sum();
  const auto outcome =
      world.backward({.roots = {loss}, .flags = {.retain_graph = true, .anomaly = true}});
  ASSERT_TRUE(outcome.error);
  EXPECT_NE(std::string(outcome.error->what()).find("returned nan values in its 0th output"),
            std::string::npos)
      << outcome.error->what();
  EXPECT_FALSE(world.backward({.roots = {loss}}).error);
}

TEST(Strand, SumsABroadcastGradientDownAndRefusesAWrongShape) {
  struct Wide : torch::autograd::Function<Wide> {
    static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x.sum(); }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   torch::autograd::variable_list) {
      return {at::ones({4, 3}, at::kFloat)};
    }
  };
  LocalWorld world(1);
  const auto x = leaf({3}), y = leaf({7});
  ASSERT_FALSE(world.backward({.roots = {Wide::apply(x)}}).error);
  EXPECT_TRUE(same_gradient(world.gradient(x), at::full({3}, 4.0, at::kDouble)));
  const auto outcome = world.backward({.roots = {Wide::apply(y)}});
  ASSERT_TRUE(outcome.error);
  EXPECT_NE(std::string(outcome.error->what()).find("invalid gradient at index 0"),
            std::string::npos)
      << outcome.error->what();
}

TEST(Strand, WorksForPassesOnManyThreadsOverSharedParameters) {
  constexpr int kPasses = 40;
  LocalWorld world(2, 4);
  const auto p = leaf({8, 8});
  std::vector<at::Tensor> losses;
  at::Tensor expected = at::zeros({8, 8}, at::kDouble);
  for (int i = 0; i < kPasses; ++i) {
    losses.push_back(world.cut(at::matmul(p, p) * i, 0).sum());
    expected = expected + stock_gradients({(at::matmul(p, p) * i).sum()}, {p})[0];
  }
  std::vector<std::thread> threads;
  std::atomic<int> next{0}, failures{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = next++; i < kPasses; i = next++) {
        if (world
                .backward({.part = 1,
                           .roots = {losses[static_cast<std::size_t>(i)]},
                           .flags = {.retain_graph = true}})
                .error)
          ++failures;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
  EXPECT_TRUE(same_gradient(world.gradient(p, 0), expected));
}

TEST(Strand, SurvivesAGraphDeeperThanAStack) {
  LocalWorld world(1);
  const auto x = leaf({1});
  at::Tensor y = x;
  for (int i = 0; i < 60000; ++i) y = y + 1;
  const auto outcome = world.backward({.roots = {y.sum()}});
  ASSERT_FALSE(outcome.error);
  EXPECT_TRUE(same_gradient(world.gradient(x), at::ones({1}, at::kDouble)));
}

TEST(RecvNode, TellsTheLocalEngineThatItCannotFollow) {
  LocalWorld world(2);
  const auto x = leaf({2});
  const auto received = world.cut(x * 1, 0);
  try {
    received.sum().backward();
    FAIL() << "the local engine went through a recv node";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("call backward() of the dist_autograd::Context"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace stitch::dist_autograd::testing::strand_test
