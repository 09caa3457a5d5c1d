// Steps of rows in one pass over memory, beside definitions that are written out and libtorch's.
#include "stitch/dist_optim/sparse_rows.h"

#include <ATen/Parallel.h>

#include "tests/support/world_test.h"

namespace sparse_rows_test {
namespace {

namespace optim = stitch::optim;
using optim::SparseAdagrad;
using optim::SparseAdagradOptions;
using optim::SparseAdam;
using optim::SparseAdamOptions;
using optim::SparseSGD;
using optim::SparseSGDOptions;

// Some rows of a table, a few of them more than once.
at::Tensor some_gradient(std::int64_t rows, std::int64_t columns, at::ScalarType type, int step) {
  torch::manual_seed(step);
  const auto indices = torch::randint(0, rows, {1, rows}, at::kLong);
  return at::sparse_coo_tensor(indices, torch::randn({rows, columns}).to(type), {rows, columns});
}
at::Tensor table_of(std::int64_t rows, std::int64_t columns, at::ScalarType type) {
  torch::manual_seed(100);
  return torch::randn({rows, columns}).to(type).set_requires_grad(true);
}
template <class Optimizer>
void step(Optimizer& optimizer, const at::Tensor& table, const at::Tensor& gradient) {
  table.mutable_grad() = gradient;
  optimizer.step();
}
// Calls use(tag of the optimizer, options) for each of them.
void for_each_rule(
    const std::function<
        void(std::function<std::unique_ptr<torch::optim::Optimizer>(const at::Tensor&)>)>& use) {
  use([](const at::Tensor& table) {
    return std::make_unique<SparseSGD>(std::vector{table}, SparseSGDOptions(0.1));
  });
  use([](const at::Tensor& table) {
    return std::make_unique<SparseAdagrad>(std::vector{table},
                                           SparseAdagradOptions(0.1).lr_decay(0.1));
  });
  use([](const at::Tensor& table) {
    return std::make_unique<SparseAdagrad>(std::vector{table},
                                           SparseAdagradOptions(0.1).rowwise(false));
  });
  use([](const at::Tensor& table) {
    return std::make_unique<SparseAdam>(std::vector{table}, SparseAdamOptions(0.1));
  });
}

constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};

// FBGEMM's EXACT_ROWWISE_ADAGRAD without weight decay: the gradients of a row are added up first.
TEST(SparseRows, RowwiseAdagradIsFbgemms) {
  constexpr std::int64_t kRows = 50, kColumns = 37;
  constexpr double kRate = 0.05, kEps = 1e-8;
  const auto table = table_of(kRows, kColumns, at::kFloat);
  auto expected = table.detach().to(at::kDouble);
  std::vector<double> momentum1(kRows, 0.0);
  SparseAdagrad optimizer({table}, SparseAdagradOptions(kRate).eps(kEps));
  for (int i = 0; i < 5; ++i) {
    const auto gradient = some_gradient(kRows, kColumns, at::kFloat, i);
    step(optimizer, table, gradient);
    const auto once = gradient.to(at::kDouble).coalesce();
    for (std::int64_t k = 0; k < once._nnz(); ++k) {
      const auto row = once.indices()[0][k].item<std::int64_t>();
      const auto grad = once.values()[k];
      double sum_square = 0;
      for (std::int64_t d = 0; d < kColumns; ++d)
        sum_square += grad[d].item<double>() * grad[d].item<double>();
      auto& sum = momentum1[static_cast<std::size_t>(row)];
      sum += sum_square / kColumns;
      const double multiplier = kRate / (std::sqrt(sum) + kEps);
      expected[row] -= multiplier * grad;
    }
    EXPECT_TRUE(torch::allclose(table.to(at::kDouble), expected, 1e-6, 1e-6)) << "step " << i;
  }
}

TEST(SparseRows, AdagradForEachElementIsTorchs) {
  const auto mine = table_of(40, 9, at::kDouble), theirs = table_of(40, 9, at::kDouble);
  SparseAdagrad optimizer({mine}, SparseAdagradOptions(0.1).lr_decay(0.1).rowwise(false));
  torch::optim::Adagrad torchs({theirs}, torch::optim::AdagradOptions(0.1).lr_decay(0.1));
  for (int i = 0; i < 5; ++i) {
    const auto gradient = some_gradient(40, 9, at::kDouble, i);
    step(optimizer, mine, gradient);
    step(torchs, theirs, gradient);
  }
  EXPECT_TRUE(torch::allclose(mine, theirs, 1e-12, 1e-12));
}

// Computed in float32, with a state of float32, and rounded once.
TEST(SparseRows, OfHalfPrecisionAreThoseOfFloatRounded) {
  for (const auto type : {at::kHalf, at::kBFloat16}) {
    for_each_rule([&](const auto& make) {
      const auto half = table_of(30, 21, type);
      const auto full = half.detach().to(at::kFloat).set_requires_grad(true);
      const auto of_half = make(half), of_full = make(full);
      for (int i = 0; i < 4; ++i) {
        auto gradient = some_gradient(30, 21, type, i);
        step(*of_half, half, gradient);
        gradient = at::sparse_coo_tensor(gradient._indices(), gradient._values().to(at::kFloat),
                                         gradient.sizes());
        step(*of_full, full, gradient);
        const torch::NoGradGuard no_grad;
        EXPECT_TRUE(torch::equal(half, full.to(type))) << type << " step " << i;
        full.copy_(half);
      }
    });
  }
}

// A table whose rows do not lie one after the other in memory, and one whose rows do.
TEST(SparseRows, AreTheSameByOperatorsOfLibtorch) {
  for (const auto type : kTypes) {
    for_each_rule([&](const auto& make) {
      const auto table = table_of(30, 21, type);
      const auto apart = table.detach().t().contiguous().t().set_requires_grad(true);
      ASSERT_FALSE(apart.is_contiguous());
      const auto mine = make(table), theirs = make(apart);
      for (int i = 0; i < 3; ++i) {
        const auto gradient =
            i == 1 ? some_gradient(30, 21, type, i).to_dense() : some_gradient(30, 21, type, i);
        step(*mine, table, gradient);
        step(*theirs, apart, gradient);
      }
      const double tolerance = type == at::kDouble  ? 1e-12
                               : type == at::kFloat ? 1e-5
                               : type == at::kHalf  ? 2e-3
                                                    : 2e-2;
      EXPECT_TRUE(torch::allclose(table, apart, tolerance, tolerance))
          << type << (table - apart).abs().max();
      EXPECT_FALSE(torch::allclose(table, table_of(30, 21, type), 0.01, 0.01));
    });
  }
}

// Chunks of several threads begin and end in the middle of a row's places; widths are no multiples
// of a vector.
TEST(SparseRows, AreTheSameToTheLastBitOnSeveralThreadsAndWithoutVectors) {
  const auto threads = at::get_num_threads();
  const bool vectors = optim::step_rows_with_avx2;
  for (const auto type : kTypes) {
    for (const std::int64_t columns : {1, 7, 64, 100}) {
      for_each_rule([&](const auto& make) {
        const auto stepped = [&](int with_threads, bool with_vectors) {
          at::set_num_threads(with_threads);
          optim::step_rows_with_avx2 = with_vectors;
          const std::int64_t rows = 100000 / columns;
          const auto table = table_of(rows, columns, type);
          const auto optimizer = make(table);
          const auto indices = torch::randint(0, 1 + rows / 50, {1, rows}, at::kLong);
          step(*optimizer, table,
               at::sparse_coo_tensor(indices, torch::randn({rows, columns}).to(type),
                                     {rows, columns}));
          return table.detach();
        };
        const auto expected = stepped(1, vectors);
        EXPECT_TRUE(torch::equal(stepped(2, vectors), expected)) << type << ' ' << columns;
        EXPECT_TRUE(torch::equal(stepped(1, false), expected)) << type << ' ' << columns;
      });
    }
  }
  at::set_num_threads(threads);
  optim::step_rows_with_avx2 = vectors;
}

TEST(SparseRows, CountUpTheVersionOfTheirTable) {
  for_each_rule([](const auto& make) {
    const auto table = table_of(4, 3, at::kFloat);
    const auto before = table._version();
    step(*make(table), table, some_gradient(4, 3, at::kFloat, 1));
    EXPECT_GT(table._version(), before);
  });
}

TEST(SparseRows, ThatAreNotThereAreRefusedAndNothingIsStepped) {
  for (const std::int64_t row : {std::int64_t{4}, std::int64_t{-1}, std::int64_t{1} << 40}) {
    for_each_rule([&](const auto& make) {
      const auto table = torch::ones({4, 3}).set_requires_grad(true);
      const auto optimizer = make(table);
      const auto indices = torch::tensor({std::int64_t{1}, row}).unsqueeze(0);
      table.mutable_grad() = at::_sparse_coo_tensor_unsafe(indices, torch::ones({2, 3}), {4, 3});
      EXPECT_THROW(optimizer->step(), c10::Error);
      table.mutable_grad() =
          at::sparse_coo_tensor(torch::zeros({1, 1}, at::kLong), torch::ones({1, 4}), {4, 4});
      EXPECT_THROW(optimizer->step(), c10::Error) << "of another shape";
      EXPECT_TRUE(torch::equal(table, torch::ones({4, 3})));
    });
  }
}

}  // namespace
}  // namespace sparse_rows_test
