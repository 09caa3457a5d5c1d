#include "stitch/dist_autograd/graph/gradient_store.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "stitch/dist_autograd/graph/compat.h"

namespace stitch::dist_autograd::testing {
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

TEST(Accumulate, AddsInPlaceOnlyWithoutOtherReferences) {
  const at::NoGradGuard off;
  at::Tensor slot = torch::ones({3});
  const void* memory = slot.data_ptr();
  accumulate(slot, torch::ones({3}));
  EXPECT_EQ(slot.data_ptr(), memory);
  const at::Tensor held = slot;
  accumulate(slot, torch::ones({3}));
  EXPECT_TRUE(held.equal(torch::full({3}, 2.0)));
  EXPECT_TRUE(slot.equal(torch::full({3}, 3.0)));
  accumulate(slot, at::Tensor());
  EXPECT_TRUE(slot.equal(torch::full({3}, 3.0)));
}

}  // namespace
}  // namespace stitch::dist_autograd::testing
