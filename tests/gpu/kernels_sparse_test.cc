#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/sgd.h>

#include <random>

#include "tests/gpu/kernels_host_run.h"
#include "tests/gpu/sparse_reference.h"

namespace stitch::transport::gpu::kernels::kernels_sparse_test {
namespace {

constexpr SparseRule kRules[] = {SparseRule::sgd, SparseRule::adagrad, SparseRule::rowwise_adagrad,
                                 SparseRule::adam};

// Vectors of float are aligned to 16 by malloc, which the wide path wants.
void place(SparseCase& c, SparseUpdate& update) {
  const auto address = [](auto& values) { return reinterpret_cast<std::uint64_t>(values.data()); };
  update.indices = address(c.indices);
  update.gradients = address(c.gradients);
  update.weights = address(c.weights);
  update.first_state = address(c.first);
  update.second_state = address(c.second);
}

int run(SparseCase& c) {
  SparseUpdate update = c.update();
  place(c, update);
  return run_sparse(update);
}

void expect_as_reference(SparseCase c, double tolerance) {
  const SparseTables expected = sparse_reference(c);
  ASSERT_EQ(run(c), 0);
  EXPECT_LE(largest_difference(c.weights, expected.weights), tolerance);
  EXPECT_LE(largest_difference(c.first, expected.first), tolerance);
  EXPECT_LE(largest_difference(c.second, expected.second), tolerance);
}

TEST(SparseKernel, UpdatesRowsAsInDoublePrecision) {
  std::mt19937_64 random(1);
  for (const SparseRule rule : kRules) {
    for (int round = 0; round < 60; ++round) {
      const auto rows = static_cast<std::int64_t>(1 + random() % 200);
      const auto columns = static_cast<std::int64_t>(1 + random() % 70);
      const auto stride = columns + static_cast<std::int64_t>(random() % 3);
      const auto count = static_cast<std::int64_t>(random() % 400);
      SCOPED_TRACE("rule " + std::to_string(static_cast<int>(rule)) + ", rows " +
                   std::to_string(rows) + ", columns " + std::to_string(columns) + ", count " +
                   std::to_string(count));
      expect_as_reference(random_sparse_case(rule, rows, columns, stride, count, 0, random), 1e-5);
    }
  }
}

TEST(SparseKernel, SumsIndicesThatRepeatThousandsOfTimes) {
  std::mt19937_64 random(2);
  for (const SparseRule rule : kRules) {
    for (const std::int64_t count : {31, 32, 33, 63, 64, 65, 1000, 5000}) {
      SCOPED_TRACE("rule " + std::to_string(static_cast<int>(rule)) + ", count " +
                   std::to_string(count));
      expect_as_reference(random_sparse_case(rule, 1, 8, 8, count, 0, random), 1e-4);
      expect_as_reference(random_sparse_case(rule, 40, 5, 7, count, 0.5, random), 1e-4);
    }
  }
}

TEST(SparseKernel, UpdatesRowsOfMoreColumnsThanStayInRegisters) {
  std::mt19937_64 random(3);
  for (const SparseRule rule : kRules) {
    for (const std::int64_t columns : {511, 512, 513, 516, 1300}) {
      SCOPED_TRACE("rule " + std::to_string(static_cast<int>(rule)) + ", columns " +
                   std::to_string(columns));
      expect_as_reference(random_sparse_case(rule, 10, columns, columns, 50, 0.8, random), 1e-5);
    }
  }
}

TEST(SparseKernel, LeavesRowsThatNoIndexNamesAsTheyAre) {
  std::mt19937_64 random(4);
  for (const SparseRule rule : kRules) {
    SparseCase c = random_sparse_case(rule, 10, 8, 8, 100, 0, random);
    for (std::int64_t& index : c.indices) index = index % 2 == 0 ? index : 3;
    const SparseCase before = c;
    ASSERT_EQ(run(c), 0);
    for (const std::size_t row : {1U, 5U, 7U, 9U}) {
      for (std::size_t i = row * 8; i < row * 8 + 8; ++i) {
        ASSERT_EQ(c.weights[i], before.weights[i]);
        ASSERT_EQ(c.second[i], before.second[i]);
        if (rule != SparseRule::rowwise_adagrad) {
          ASSERT_EQ(c.first[i], before.first[i]);
        }
      }
      if (rule == SparseRule::rowwise_adagrad) {
        ASSERT_EQ(c.first[row], before.first[row]);
      }
    }
  }
}

TEST(SparseKernel, SkipsIndicesOutsideOfTheTable) {
  std::mt19937_64 random(5);
  for (const SparseRule rule : kRules) {
    SparseCase c = random_sparse_case(rule, 10, 4, 4, 200, 0, random);
    for (std::size_t i = 0; i < c.indices.size(); i += 3) c.indices[i] = i % 2 == 0 ? -1 : 10;
    expect_as_reference(c, 1e-5);
  }
}

TEST(SparseKernel, FindsEachChunkOnceAndEachLongRunOnce) {
  std::mt19937_64 random(6);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::uint32_t> keys(1 + random() % 300);
    const std::uint64_t different = 1 + random() % 12;
    for (std::uint32_t& key : keys) key = static_cast<std::uint32_t>(random() % different);
    std::sort(keys.begin(), keys.end());
    SparseArguments a{};
    a.keys = keys.data();
    a.count = static_cast<std::uint32_t>(keys.size());
    a.rows = static_cast<std::uint32_t>(different);
    std::uint32_t covered = 0;
    std::uint32_t whole = 0;
    std::uint32_t tails = 0;
    for (std::uint32_t at = 0; at < a.count; ++at) {
      const Chunk chunk = chunk_at(a, at);
      if (chunk.kind == ChunkKind::kNone) continue;
      ASSERT_EQ(chunk.begin, covered);
      ASSERT_LE(chunk.end - chunk.begin, kBlockPositions);
      covered = chunk.end;
      whole += chunk.kind == ChunkKind::kWhole ? 1 : 0;
      tails += chunk.kind == ChunkKind::kTail ? 1 : 0;
    }
    ASSERT_EQ(covered, a.count);
    std::uint32_t runs = 0;
    for (std::uint32_t block = 0; block < sparse_blocks(a.count); ++block) {
      const LongRun run = long_run_in(a, block);
      if (!run.exists) continue;
      ++runs;
      ASSERT_EQ(keys[run.last_block * kBlockPositions], run.row);
      const std::uint32_t behind = (run.last_block + 1) * kBlockPositions;
      if (behind < a.count) {
        ASSERT_NE(keys[behind], run.row);
      }
    }
    ASSERT_EQ(runs, tails);
    const auto unique = std::unique(keys.begin(), keys.end()) - keys.begin();
    ASSERT_EQ(runs + whole, static_cast<std::uint32_t>(unique));
  }
}

TEST(SparseKernel, RefusesWhatARuleCannotWorkWith) {
  std::mt19937_64 random(7);
  SparseCase c = random_sparse_case(SparseRule::adam, 10, 4, 4, 20, 0, random);
  SparseUpdate update = c.update();
  place(c, update);
  SparseArguments arguments;
  const auto status = [&](auto&& change) {
    SparseUpdate changed = update;
    change(changed);
    return plan_sparse(changed, &arguments);
  };
  EXPECT_EQ(status([](SparseUpdate&) {}), kKernelSuccess);
  EXPECT_EQ(status([](SparseUpdate& u) { u.second_state = 0; }), kKernelBadRule);
  EXPECT_EQ(status([](SparseUpdate& u) { u.step = 0; }), kKernelBadRule);
  EXPECT_EQ(status([](SparseUpdate& u) { u.rule = static_cast<SparseRule>(9); }), kKernelBadRule);
  EXPECT_EQ(status([](SparseUpdate& u) { u.state_stride = 3; }), kKernelBadShape);
  EXPECT_EQ(status([](SparseUpdate& u) { u.count = -1; }), kKernelBadShape);
  EXPECT_EQ(status([](SparseUpdate& u) { u.rows = 0xffffffffLL; }), kKernelBadShape);
  EXPECT_EQ(status([](SparseUpdate& u) { u.weights += 2; }), kKernelMisaligned);
}

// The gradients of a case as torch has them: an uncoalesced sparse tensor.
at::Tensor sparse_gradient(SparseCase& c) {
  const at::Tensor indices = at::tensor(c.indices).unsqueeze(0);
  const at::Tensor values =
      at::from_blob(c.gradients.data(), {static_cast<std::int64_t>(c.indices.size()), c.columns})
          .clone();
  return at::sparse_coo_tensor(indices, values, {c.rows, c.columns}).coalesce();
}
at::Tensor table_of(std::vector<float>& values, const SparseCase& c) {
  return at::from_blob(values.data(), {c.rows, c.columns}).clone();
}

TEST(SparseKernel, SgdStepsAsTorchsOptimizer) {
  std::mt19937_64 random(8);
  SparseCase c = random_sparse_case(SparseRule::sgd, 30, 16, 16, 100, 0.2, random);
  const at::Tensor weights = table_of(c.weights, c).requires_grad_();
  weights.mutable_grad() = sparse_gradient(c);
  torch::optim::SGD(std::vector<at::Tensor>{weights}, c.learning_rate).step();
  ASSERT_EQ(run(c), 0);
  EXPECT_TRUE(at::allclose(table_of(c.weights, c), weights, 1e-5, 1e-6));
}

TEST(SparseKernel, AdagradStepsAsTorchsOptimizerDoesForSparseGradients) {
  std::mt19937_64 random(9);
  SparseCase c = random_sparse_case(SparseRule::adagrad, 30, 16, 16, 100, 0.2, random);
  std::fill(c.first.begin(), c.first.end(), 0.25F);
  const at::Tensor weights = table_of(c.weights, c).requires_grad_();
  torch::optim::Adagrad optimizer(std::vector<at::Tensor>{weights},
                                  torch::optim::AdagradOptions(c.learning_rate)
                                      .lr_decay(c.lr_decay)
                                      .initial_accumulator_value(0.25)
                                      .eps(c.eps));
  for (c.step = 1; c.step <= 3; ++c.step) {
    weights.mutable_grad() = sparse_gradient(c);
    optimizer.step();
    ASSERT_EQ(run(c), 0);
    ASSERT_TRUE(at::allclose(table_of(c.weights, c), weights, 1e-5, 1e-6)) << c.step;
  }
}

}  // namespace
}  // namespace stitch::transport::gpu::kernels::kernels_sparse_test
