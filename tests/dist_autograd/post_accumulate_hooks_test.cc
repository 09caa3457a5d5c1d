// Hooks that libtorch 2.x runs when it has added to `.grad` of a leaf. A pass of a context has sums
// of its own and does not run them.
#include <type_traits>

#include "tests/dist_autograd/remote_parts.h"
#include "tests/support/equal_gradients.h"
#include "tests/support/world_test.h"

namespace stitch::testing::post_accumulate_hooks_test {
namespace {

using dist_autograd::Context;

at::Tensor& leaf_of_worker1() {
  static at::Tensor one;
  return one;
}
at::Tensor times_leaf_of_worker1(at::Tensor x) { return x * leaf_of_worker1(); }

// They are recognized by what a node has; the rest is a template, so that it is only compiled then.
template <class N>
concept HasPostAccumulateHooks = requires(const N& node) {
  node.tensor_post_acc_grad_hooks();
};
template <class N>
using PostAccumulateHook = typename std::remove_cvref_t<
    decltype(std::declval<const N&>().tensor_post_acc_grad_hooks())>::element_type;

// As an optimizer that steps in backward.
template <class Hook>
struct CountingHook final : Hook {
  static inline std::atomic<int> calls{0};
  void operator()(const torch::autograd::Variable& leaf) override {
    ++calls;
    leaf.mutable_grad() = at::Tensor();
  }
};

template <HasPostAccumulateHooks N>
void count_post_accumulate_calls(const at::Tensor& leaf) {
  using namespace torch::autograd::impl;  // NOLINT: looked up where the hooks are there
  using Hook = PostAccumulateHook<N>;
  set_post_acc_grad_hooks(leaf, std::unique_ptr<Hook>(std::make_unique<CountingHook<Hook>>()));
}

template <HasPostAccumulateHooks N>
class PostAccumulateHooks : public ::testing::Test {
 public:
  void TestBody() override {
    Cluster cluster(2);
    const auto x = ones().requires_grad_();
    const auto there = leaf_of_worker1() = (2 * ones()).requires_grad_();
    count_post_accumulate_calls<N>(x);
    count_post_accumulate_calls<N>(there);
    auto& calls = CountingHook<PostAccumulateHook<N>>::calls;
    calls = 0;
    (x * there).sum().backward();
    ASSERT_EQ(calls, 2) << "libtorch's own engine calls them";
    x.mutable_grad() = 3 * ones();
    Context context;
    const auto product = rpc_sync<times_leaf_of_worker1>("worker1", x);
    context.backward({product.sum()}, {.retain_graph = true});
    context.backward({product.sum()});
    EXPECT_EQ(calls, 2) << "a pass of a context does not";
    EXPECT_TRUE(equal_gradients(context.gradient(x), 2 * there.detach()));
    EXPECT_TRUE(equal_gradients(x.grad(), 3 * ones())) << "and leaves .grad alone";
    const WorkerScope scope(cluster[1]);
    EXPECT_TRUE(
        equal_gradients(dist_autograd::find_context(context.id()).gradient(there), 2 * x.detach()));
    EXPECT_FALSE(there.grad().defined());
    leaf_of_worker1() = at::Tensor();
  }
};

// A test where this libtorch has such hooks, as TEST() makes one.
template <class N>
bool register_post_accumulate_tests() {
  if constexpr (HasPostAccumulateHooks<N>) {
    ::testing::RegisterTest("PostAccumulateHooks", "AreNotCalledAndGradIsLeftAlone", nullptr,
                            nullptr, __FILE__, __LINE__,
                            []() -> ::testing::Test* { return new PostAccumulateHooks<N>; });
  }
  return HasPostAccumulateHooks<N>;
}
[[maybe_unused]] const bool post_accumulate_tests =
    register_post_accumulate_tests<torch::autograd::Node>();

}  // namespace
}  // namespace stitch::testing::post_accumulate_hooks_test
