#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

// A table of weights with its state and one batch of gradients, and the same after a step of a
// sparse optimizer, computed in fp64.
namespace stitch::testing {

enum class SparseRule { sgd, rowwise_adagrad, adam };

struct SparseCase {
  SparseRule rule = SparseRule::sgd;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t stride = 0;  // of weights, state and gradients
  std::int64_t step = 1;
  double learning_rate = 0.1;
  double lr_decay = 0.01;
  double eps = 1e-8;
  double beta1 = 0.9;
  double beta2 = 0.999;
  std::vector<std::int64_t> indices;
  std::vector<float> gradients;
  std::vector<float> weights;
  std::vector<float> first;
  std::vector<float> second;
};

// Random values. Indices are in the table, each equally likely; see `hot` for others: that share of
// them is 0.
template <class Random>
SparseCase random_sparse_case(SparseRule rule, std::int64_t rows, std::int64_t columns,
                              std::int64_t stride, std::int64_t count, double hot, Random& random) {
  SparseCase c;
  c.rule = rule;
  c.rows = rows;
  c.columns = columns;
  c.stride = stride;
  c.step = 3;
  const auto unit = [&random] { return static_cast<double>(random() % 65536) / 65536; };
  const auto fill = [&](std::vector<float>& values, std::int64_t n, double low, double high) {
    values.resize(static_cast<std::size_t>(n));
    for (float& value : values) value = static_cast<float>(low + (high - low) * unit());
  };
  fill(c.gradients, count * stride, -1, 1);
  fill(c.weights, rows * stride, -1, 1);
  fill(c.first, rows * stride, 0, 1);
  fill(c.second, rows * stride, 0, 1);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto index = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(rows));
    c.indices.push_back(unit() < hot ? 0 : index);
  }
  return c;
}

// The tables after the update.
struct SparseTables {
  std::vector<double> weights;
  std::vector<double> first;
  std::vector<double> second;
};

inline SparseTables sparse_reference(const SparseCase& c) {
  SparseTables t{{c.weights.begin(), c.weights.end()},
                 {c.first.begin(), c.first.end()},
                 {c.second.begin(), c.second.end()}};
  std::map<std::int64_t, std::vector<double>> sums;
  for (std::size_t i = 0; i < c.indices.size(); ++i) {
    if (c.indices[i] < 0 || c.indices[i] >= c.rows) continue;
    auto& sum = sums[c.indices[i]];
    sum.resize(static_cast<std::size_t>(c.columns));
    for (std::size_t k = 0; k < sum.size(); ++k)
      sum[k] += static_cast<double>(c.gradients[i * static_cast<std::size_t>(c.stride) + k]);
  }
  const auto step = static_cast<double>(c.step);
  const double decayed = c.learning_rate / (1 + (step - 1) * c.lr_decay);
  const double corrected =
      c.learning_rate * std::sqrt(1 - std::pow(c.beta2, step)) / (1 - std::pow(c.beta1, step));
  for (const auto& [row, sum] : sums) {
    const auto base = static_cast<std::size_t>(row * c.stride);
    double squares = 0;
    for (const double g : sum) squares += g * g;
    if (c.rule == SparseRule::rowwise_adagrad)
      t.first[static_cast<std::size_t>(row)] += squares / static_cast<double>(c.columns);
    for (std::size_t k = 0; k < sum.size(); ++k) {
      const double g = sum[k];
      double& w = t.weights[base + k];
      if (c.rule == SparseRule::sgd) {
        w -= c.learning_rate * g;
      } else if (c.rule == SparseRule::rowwise_adagrad) {
        w -= decayed * g / (std::sqrt(t.first[static_cast<std::size_t>(row)]) + c.eps);
      } else {
        double& m = t.first[base + k];
        double& v = t.second[base + k];
        m = c.beta1 * m + (1 - c.beta1) * g;
        v = c.beta2 * v + (1 - c.beta2) * g * g;
        w -= corrected * m / (std::sqrt(v) + c.eps);
      }
    }
  }
  return t;
}

// The largest difference, relative where values are above 1.
inline double largest_difference(const std::vector<float>& values,
                                 const std::vector<double>& expected) {
  double largest = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double difference = std::abs(static_cast<double>(values[i]) - expected[i]) /
                              std::max(1.0, std::abs(expected[i]));
    if (!(difference <= largest)) largest = difference;  // not a number counts, too
  }
  return largest;
}

}  // namespace stitch::testing
