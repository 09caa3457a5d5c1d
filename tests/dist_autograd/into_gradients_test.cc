// Results received into the caller's own tensors under a context: in backward the memory counts as
// one tensor, over every transport and in every size.
#include "tests/dist_autograd/remote_parts.h"
#include "tests/support/world_test.h"

namespace stitch::testing::into_gradients_test {
namespace {

using dist_autograd::Context;

at::Tensor scaled(at::Tensor x, double by) { return x * by; }
at::Tensor scaled_transposed(at::Tensor x, double by) { return (x * by).t().contiguous().t(); }

class IntoGradients : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    cluster_.emplace(2, [](Options& options) { options.transports = {GetParam()}; });
  }
  // What a backward over two calls finds for w; their results are received into these.
  static double gradient(const at::Tensor& b1, const at::Tensor& b2) {
    const at::Tensor x = at::ones(b1.sizes()).requires_grad_();
    const at::Tensor w = at::ones(b1.sizes()).requires_grad_();
    Context context;
    const at::Tensor y1 = rpc_sync<scaled>(Target("worker1").into(b1), x, 2.0);
    const at::Tensor loss1 = (y1 * w).sum();  // saves y1: it is the gradient of w
    const at::Tensor y2 = rpc_sync<scaled>(Target("worker1").into(b2), x, 3.0);
    const at::Tensor loss2 = (y2 * w).sum();
    context.backward({loss1 + loss2});
    return context.gradient(w).mean().item<double>();
  }
  static void expect_version_error(const Error& error) {
    EXPECT_NE(std::string(error.what()).find("modified by an inplace operation"), std::string::npos)
        << error.what();
  }
  std::optional<Cluster> cluster_;
};
INSTANTIATE_TEST_SUITE_P(Over, IntoGradients, ::testing::Values("loopback", "shm", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(IntoGradients, OfTwoCallsIntoOneTensorAreAnErrorAndIntoTwoAreRight) {
  for (const std::int64_t n : {3, 1 << 16}) {
    EXPECT_EQ(gradient(at::empty({n}), at::empty({n})), 5) << n;
    const at::Tensor one = at::empty({n});
    expect_version_error(error_of([&] { static_cast<void>(gradient(one, one)); }));
    // Parts of one tensor are one memory, too.
    const at::Tensor rows = at::empty({2, n});
    expect_version_error(error_of([&] { static_cast<void>(gradient(rows[0], rows[1])); }));
  }
}

TEST_P(IntoGradients, AreAnErrorWhenTheTensorHasChangedBeforeBackward) {
  for (const std::int64_t n : {3, 1 << 16}) {
    const at::Tensor x = at::ones({n}).requires_grad_(), w = at::ones({n}).requires_grad_();
    const at::Tensor b = at::empty({n});
    Context context;
    const at::Tensor loss = (rpc_sync<scaled>(Target("worker1").into(b), x, 2.0) * w).sum();
    b.zero_();
    expect_version_error(error_of([&] { context.backward({loss}); }));
  }
}

TEST_P(IntoGradients, AreThoseOfATensorOverTheSameMemory) {
  for (const std::int64_t n : {2, 300}) {
    const at::Tensor x = at::ones({n, n}).requires_grad_();
    const at::Tensor b = at::empty({n, n});
    Context context;
    const at::Tensor y = rpc_sync<scaled_transposed>(Target("worker1").into(b), x, 2.0);
    EXPECT_TRUE(y.grad_fn()) << n;
    EXPECT_FALSE(b.requires_grad()) << n;
    EXPECT_EQ(y.data_ptr(), b.data_ptr()) << n;
    EXPECT_TRUE(at::equal(b, at::full({n, n}, 2.0F))) << n;
    context.backward({(y * y).sum()});
    EXPECT_TRUE(at::equal(context.gradient(x), at::full({n, n}, 8.0F))) << n;
  }
}

}  // namespace
}  // namespace stitch::testing::into_gradients_test
