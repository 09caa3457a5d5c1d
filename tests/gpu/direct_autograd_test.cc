// Distributed autograd whose tensors and gradients go from device to device by transfers, over the
// double of CUDA and NCCL.
#include "tests/gpu/device_test.h"

namespace direct_autograd_test {  // its functions are registered under their full names
namespace {

using namespace stitch::testing::device_names;  // NOLINT

[[maybe_unused]] const bool installed = fake::install();

struct Layer {
  at::Tensor weight;
  Layer() = default;
  explicit Layer(at::Tensor initial) : weight(initial.detach().requires_grad_()) {}
  at::Tensor forward(const at::Tensor& input) { return at::tanh(input.mm(weight)); }
};

TEST(DirectGradients, OverTransfersEqualThoseOfOneProcessOnTheCpu) {
  constexpr std::int64_t kWidth = 160;  // 100 KiB a matrix: a transfer
  struct Case {
    bool apart;
    int there;  // worker 1's device
  };
  for (const Case each : {Case{false, 1}, Case{true, 1}, Case{true, 0}}) {
    const int there = each.there;
    fake::workers_are_processes(each.apart);
    Cluster cluster(2, there == 1 ? std::function<void(Options&)>(worker0_maps) : nullptr);
    const auto sent = [&](const char* path) {
      return count(cluster[1], std::string("gpu.sent_messages.") + path +
                                   ".worker0.cuda:" + std::to_string(there));
    };
    at::manual_seed(7);
    const at::Tensor input = at::randn({kWidth, kWidth});
    const at::Tensor first = at::randn({kWidth, kWidth});
    const at::Tensor second = at::randn({kWidth, kWidth});
    const at::Tensor cpu_input = input.clone().requires_grad_();
    const at::Tensor cpu_weight = first.clone().requires_grad_();
    at::tanh(at::tanh(cpu_input.mm(cpu_weight)).mm(second)).sum().backward();

    const at::Tensor device_input = input.to(device(0)).requires_grad_();
    const at::Tensor device_weight = first.to(device(0)).requires_grad_();
    const auto layer = stitch::remote<Layer>("worker1", second.to(device(0)));
    const stitch::dist_autograd::Context context;
    const at::Tensor hidden = at::tanh(device_input.mm(device_weight));
    const at::Tensor output = layer.rpc_sync<&Layer::forward>(hidden);
    EXPECT_EQ(output.device(), device(0));
    context.backward({output.sum()});
    const auto gradients = context.gradients();
    EXPECT_EQ(gradients.at(device_input).device(), device(0));
    EXPECT_TRUE(at::allclose(gradients.at(device_input).cpu(), cpu_input.grad(), 1e-4, 1e-5));
    EXPECT_TRUE(at::allclose(gradients.at(device_weight).cpu(), cpu_weight.grad(), 1e-4, 1e-5));
    ASSERT_TRUE(all_is_counted(cluster[1]));
    // A result and a gradient.
    EXPECT_GT(sent("staging") + sent("nccl") + sent("peer"), 1);
  }
}

}  // namespace
}  // namespace direct_autograd_test
