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

TEST(Strand, AcceptsALeafAsRootAndSeveralRootsMeetingInOneNode) {
  LocalWorld world(1);
  const auto x = leaf({3});
  const auto y = x * 2;
  world.backward({.roots = {x, y, y},
                  .seeds = {at::ones({3}, at::kDouble), at::ones({3}, at::kDouble),
                            at::full({3}, 5.0, at::kDouble)}});
  EXPECT_TRUE(same_gradient(world.gradient(x), at::full({3}, 13.0, at::kDouble)));
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
