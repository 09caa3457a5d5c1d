#include "stitch/dist_autograd/graph/gradient_store.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "stitch/dist_autograd/graph/compat.h"

namespace stitch::dist_autograd::testing::gradient_store_test {
namespace {

TEST(GradientStore, TakesAGradientOverWhenItsMemoryHasNoOtherOwner) {
  const at::NoGradGuard off;
  GradientStore store;
  const auto p = torch::zeros({4});
  auto grad = torch::ones({4});
  const void* memory = grad.data_ptr();
  store.accumulate(p, std::move(grad));
  EXPECT_EQ(store.find(p).data_ptr(), memory);
}

TEST(GradientStore, CopiesAViewOfMemoryThatHasAnotherOwner) {
  const at::NoGradGuard off;
  GradientStore store;
  const auto p = torch::zeros({4});
  const auto in_flight = torch::ones({8});
  store.accumulate(p, in_flight.narrow(0, 0, 4));
  EXPECT_NE(store.find(p).data_ptr(), in_flight.data_ptr());
  store.accumulate(p, torch::ones({4}));
  EXPECT_TRUE(in_flight.equal(torch::ones({8})));
  EXPECT_TRUE(store.find(p).equal(torch::full({4}, 2.0)));
}

at::Tensor rows_of(const at::Tensor& indices, const at::Tensor& values) {
  return at::_sparse_coo_tensor_unsafe(indices, values, {10, 4});
}

TEST(GradientStore, TakesASparseGradientOverWhenItsMemoryHasNoOtherOwner) {
  const at::NoGradGuard off;
  GradientStore store;
  const auto p = torch::zeros({10, 4});
  const void *indices = nullptr, *values = nullptr;
  {
    auto grad = rows_of(at::tensor({1, 3}, at::kLong).unsqueeze(0), at::ones({2, 4}));
    indices = grad._indices().data_ptr();
    values = grad._values().data_ptr();
    store.accumulate(p, std::move(grad));
  }
  EXPECT_EQ(store.find(p)._indices().data_ptr(), indices);
  EXPECT_EQ(store.find(p)._values().data_ptr(), values);
}

TEST(GradientStore, CopiesASparseGradientThatIsSharedOrNotContiguous) {
  const at::NoGradGuard off;
  const auto indices = [] { return at::tensor({1, 3}, at::kLong).unsqueeze(0); };
  const auto p = torch::zeros({10, 4});
  {
    GradientStore store;
    const auto in_flight = at::ones({2, 4});
    store.accumulate(p, rows_of(indices(), in_flight));
    EXPECT_NE(store.find(p)._values().data_ptr(), in_flight.data_ptr());
  }
  {
    GradientStore store;
    auto grad = rows_of(indices(), at::ones({4, 2}).t());
    const void* const values = grad._values().data_ptr();
    store.accumulate(p, std::move(grad));
    EXPECT_NE(store.find(p)._values().data_ptr(), values);
  }
  {
    GradientStore store;
    const auto shared = rows_of(indices(), at::ones({2, 4}));
    const auto q = torch::zeros({10, 4});
    store.accumulate(p, at::Tensor(shared));
    store.accumulate(q, at::Tensor(shared));
    for (int i = 0; i < 10; ++i) store.accumulate(p, at::Tensor(shared));
    EXPECT_TRUE(store.find(p).is_sparse());
    EXPECT_TRUE(store.find(p).to_dense().equal(11 * shared.to_dense()));
    EXPECT_TRUE(store.find(q).to_dense().equal(shared.to_dense()));
    EXPECT_TRUE(shared._values().equal(at::ones({2, 4})));
  }
}

TEST(GradientStore, KeepsGradientsApartByIdentityOfTheParameter) {
  const at::NoGradGuard off;
  GradientStore store;
  const auto p = torch::zeros({2}), q = torch::zeros({2});
  store.accumulate(p, torch::ones({2}));
  EXPECT_TRUE(store.find(p).defined());
  EXPECT_FALSE(store.find(q).defined());
  EXPECT_EQ(store.snapshot().size(), 1u);
  store.clear();
  EXPECT_EQ(store.size(), 0u);
}

TEST(GradientStore, NeverChangesASnapshot) {
  const at::NoGradGuard off;
  GradientStore store;
  const auto p = torch::zeros({2});
  store.accumulate(p, torch::ones({2}));
  const auto snapshot = store.snapshot();
  store.accumulate(p, torch::ones({2}));
  EXPECT_TRUE(snapshot.at(p).equal(torch::ones({2})));
  EXPECT_TRUE(store.find(p).equal(torch::full({2}, 2.0)));
}

TEST(GradientStore, AddsInPlaceWhenItIsTheOnlyHolder) {
  const at::NoGradGuard off;
  GradientStore store;
  const auto p = torch::zeros({2});
  store.accumulate(p, torch::ones({2}));
  const void* memory = store.find(p).data_ptr();
  store.accumulate(p, torch::ones({2}));
  EXPECT_EQ(store.find(p).data_ptr(), memory);
}

}  // namespace
}  // namespace stitch::dist_autograd::testing::gradient_store_test
