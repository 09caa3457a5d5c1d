// Gradients through references that stand for arguments, and through remote modules, against the
// local engine.
#include <torch/nn/modules/linear.h>

#include "tests/dist_autograd/remote_parts.h"
#include "tests/support/equal_gradients.h"
#include "tests/support/world_test.h"

namespace stitch::testing::reference_gradients_test {
namespace {

using dist_autograd::Context;

Gate gate;
at::Tensor times_parameter_beyond_the_gate(at::Tensor x) {
  gate.pass();
  return times_parameter(x);
}
at::Tensor product(at::Tensor a, at::Tensor b) { return a * b * own_parameter(); }

at::Tensor parameter_value(Cluster& cluster, int rank) {
  return parameter_of(cluster[rank]).detach();
}

TEST(ReferenceGradients, FlowThroughAReferenceThatStandsForAnArgument) {
  Cluster cluster(3);
  const auto p0 = parameter_value(cluster, 0), p1 = parameter_value(cluster, 1),
             p2 = parameter_value(cluster, 2);
  for (const bool pending : {false, true}) {
    const auto x = ones().requires_grad_();
    Context context;
    gate.close();
    // Of another worker, of the callee, and of this one.
    const auto there = remote<times_parameter_beyond_the_gate>("worker1", x);
    if (!pending) {
      gate.open();
      there.when_created().get();
    }
    const auto at_callee = remote<product>("worker2", there, x);
    const auto result = rpc_async<product>("worker2", at_callee, make_rref(x * own_parameter()));
    gate.open();
    context.backward({result.get().sum()});
    // (x p1 x p2) (x p0) p2
    const auto x3 = x.detach().pow(3);
    EXPECT_TRUE(equal_gradients(context.gradient(x), 3 * x.detach().pow(2) * p0 * p1 * p2 * p2));
    EXPECT_TRUE(equal_gradients(gradient_on(cluster[0], context.id()), x3 * p1 * p2 * p2));
    EXPECT_TRUE(equal_gradients(gradient_on(cluster[1], context.id()), x3 * p0 * p2 * p2));
    EXPECT_TRUE(equal_gradients(gradient_on(cluster[2], context.id()), 2 * x3 * p0 * p1 * p2));
  }
}

std::vector<at::Tensor> gradients_of(std::vector<RRef<at::Tensor>> parameters) {
  std::vector<at::Tensor> gradients;
  for (const auto& each : parameters)
    gradients.push_back(dist_autograd::current_context().gradient(each.local_value()));
  return gradients;
}

TEST(ReferenceGradients, FlowThroughModulesWhoseResultsStayOnTheirOwners) {
  Cluster cluster(3);
  const RemoteModule<torch::nn::Linear> first("worker1", 4, 3), second("worker2", 3, 2);
  const auto x = at::rand({5, 4}).requires_grad_();
  std::vector<at::Tensor> leaves{x};
  for (const auto& module : {first, second}) {
    const auto state = module.state_dict();
    for (const char* name : {"weight", "bias"})
      leaves.push_back(state.at(name).detach().clone().requires_grad_());
  }
  const auto loss_of = [](const at::Tensor& y) { return (y * y).sum(); };
  const auto expected = torch::autograd::grad(
      {loss_of(at::linear(at::linear(leaves[0], leaves[1], leaves[2]), leaves[3], leaves[4]))},
      leaves);
  Context context;
  const auto kept = second.forward_remote(first.forward_remote(x));
  context.backward({loss_of(kept.to_here())});
  std::vector<at::Tensor> got{context.gradient(x)};
  for (const auto& module : {first, second}) {
    for (at::Tensor& each : rpc_sync<gradients_of>(module.owner().id, module.parameters()))
      got.push_back(std::move(each));
  }
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_TRUE(equal_gradients(got[i], expected[i], 1e-5)) << "leaf " << i;
}

}  // namespace
}  // namespace stitch::testing::reference_gradients_test
