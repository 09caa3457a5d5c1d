#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace stitch::testing {

// Equal within `tolerance` relative to the largest element expected. An undefined gradient equals
// zeros; sparse ones are made dense.
[[nodiscard]] ::testing::AssertionResult equal_gradients(const at::Tensor& got,
                                                         const at::Tensor& expected,
                                                         double tolerance = 1e-12);

}  // namespace stitch::testing
