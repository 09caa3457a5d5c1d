// Gradients that are changed between a pass and a step.
#include "tests/dist_autograd/remote_parts.h"
#include "tests/support/world_test.h"

namespace stitch::testing::changed_gradients_test {
namespace {

using dist_autograd::Context;

// Worker 2 is reached on two ways, worker 3 only by worker 1.
at::Tensor loss(const at::Tensor& x) {
  const auto a = rpc_sync<via>("worker1", std::vector<std::string>{"worker2"}, x);
  const auto b = rpc_sync<via>("worker1", std::vector<std::string>{"worker3"}, x);
  return (a + b + rpc_sync<times_parameter>("worker2", x)).sum();
}

TEST(ChangedGradients, AreScaledOnceOnEachWorker) {
  Cluster cluster(4);
  const auto x = ones().requires_grad_();
  std::vector<at::Tensor> expected;
  const auto all = [&](const Context& context) {
    std::vector<at::Tensor> gradients{context.gradient(x)};
    for (int i = 1; i < 4; ++i) gradients.push_back(gradient_on(cluster[i], context.id()));
    return gradients;
  };
  {
    Context context;
    context.backward({loss(x)});
    expected = all(context);
  }
  Context context;
  context.backward({loss(x)});
  context.backward({loss(x)});  // two passes of one context: their mean
  context.scale_gradients(0.5);
  const auto scaled = all(context);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_TRUE(expected[i].defined());
    EXPECT_TRUE(torch::allclose(scaled[i], expected[i], 1e-12)) << i;
  }
}

void scale_by_three() { dist_autograd::current_context().scale_gradients(3); }

TEST(ChangedGradients, AreScaledFromAnyWorkerOfTheContext) {
  Cluster cluster(3);
  const auto x = ones().requires_grad_();
  Context context;
  context.backward({(rpc_sync<times_parameter>("worker1", x) * 2).sum()});
  const auto before = gradient_on(cluster[1], context.id());
  rpc_sync<scale_by_three>("worker2");
  EXPECT_TRUE(torch::allclose(context.gradient(x), 6 * parameter_of(cluster[1]).detach(), 1e-12));
  EXPECT_TRUE(torch::allclose(gradient_on(cluster[1], context.id()), 3 * before, 1e-12));
}

TEST(ChangedGradients, OfAWorkerThatDoesNotAnswerFailTheContextEverywhere) {
  Cluster cluster(3, [](Options& options) { options.rpc_timeout = std::chrono::seconds(1); });
  const auto x = ones().requires_grad_();
  Context context;
  context.backward(
      {(rpc_sync<times_parameter>("worker1", x) + rpc_sync<times_parameter>("worker2", x)).sum()});
  Error error(ErrorCode::internal, "");
  {
    const LoopbackFaults late(
        [](std::uint32_t, std::uint32_t to, std::uint64_t, const transport::Message& message) {
          const bool request = kind_of(message) == rpc::wire::kRequest && to == 2;
          return transport::Fate{.delay = std::chrono::milliseconds(request ? 2500 : 0)};
        });
    error = error_of([&] { context.scale_gradients(2); });
  }
  EXPECT_EQ(error.code(), ErrorCode::timeout) << error.what();
  EXPECT_EQ(error_of([&] { static_cast<void>(context.gradient(x)); }).code(), ErrorCode::timeout);
  EXPECT_TRUE(refuses(cluster[1], context.id(), ErrorCode::timeout));
}

TEST(ChangedGradients, AreThoseThatAreSet) {
  Cluster cluster(1);
  const auto x = ones().requires_grad_(), y = ones().requires_grad_();
  Context context;
  context.backward({(x * 3).sum()});
  auto given = at::full({3}, 7.0, at::kDouble);
  context.set_gradient(x, given);
  context.set_gradient(y, context.gradient(x) + 1);
  given.zero_();
  EXPECT_TRUE(torch::equal(context.gradient(x), at::full({3}, 7.0, at::kDouble)));
  EXPECT_TRUE(torch::equal(context.gradient(y), at::full({3}, 8.0, at::kDouble)));
  context.backward({(x * 3).sum()});  // and later passes add to them
  EXPECT_TRUE(torch::equal(context.gradient(x), at::full({3}, 10.0, at::kDouble)));
  context.set_gradient(x, {});
  EXPECT_FALSE(context.gradient(x).defined());
  EXPECT_EQ(context.gradients().size(), 1U);
  context.set_gradient(x, {});
}

TEST(ChangedGradients, AreRefusedWhereTheyDoNotFit) {
  Cluster cluster(1);
  const auto x = ones().requires_grad_();
  std::optional<dist_autograd::ContextHandle> handle;
  {
    Context context;
    handle = context;
    const std::string rest = " is not of its leaf, of type Double [3] on cpu";
    EXPECT_STREQ(error_of([&] { context.set_gradient(x * 2, ones()); }).what(),
                 "a gradient can be set of a leaf tensor only");
    EXPECT_STREQ(error_of([&] { context.set_gradient(x, at::ones({2}, at::kDouble)); }).what(),
                 ("gradient of type Double [2] on cpu" + rest).c_str());
    EXPECT_STREQ(error_of([&] { context.set_gradient(x, at::ones({3}, at::kFloat)); }).what(),
                 ("gradient of type Float [3] on cpu" + rest).c_str());
    EXPECT_TRUE(context.gradients().empty());
  }
  EXPECT_EQ(error_of([&] { handle->set_gradient(x, ones()); }).code(), ErrorCode::cancelled);
  EXPECT_EQ(error_of([&] { handle->scale_gradients(2); }).code(), ErrorCode::cancelled);
}

// The gradient that a reader has keeps its value, and so does one of a graph its history.
TEST(ChangedGradients, LeaveThoseThatWereReadAndCanBeDifferentiatedAgain) {
  Cluster cluster(1);
  const auto x = ones().requires_grad_();
  Context context;
  context.backward({x.pow(3).sum()}, {.create_graph = true});
  const auto stored = context.stored_gradient(x);
  context.scale_gradients(2);
  EXPECT_TRUE(torch::allclose(stored, 3 * ones()));
  const auto again = torch::autograd::grad({context.gradient(x).sum()}, {x})[0];
  EXPECT_TRUE(torch::allclose(again, 12 * ones())) << again;
}

}  // namespace
}  // namespace stitch::testing::changed_gradients_test
