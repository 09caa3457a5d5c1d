#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "stitch/dist_optim/optimizer_traits.h"

// Optimizers for tables of which a batch uses a few rows, such as embeddings: the gradient is
// sparse (one sparse dimension, dimension 0), and only the rows that it names change, they and
// their state. A row that is named more than once is stepped once, by the sum. A dense gradient
// names all rows. By themselves, or in a DistributedOptimizer; parameters of any real
// floating-point type on any device. Rows of half precision are computed in float32, which their
// state has, too, and rounded once. On the CPU a step is one pass over the rows, by
// libtorch's threads. Thread contract: as torch::optim's.
namespace stitch::optim {

namespace detail {
// What they have in common. libtorch's own save() and load() would do nothing, without a word.
class SparseOptimizer : public torch::optim::Optimizer {
 public:
  using Optimizer::Optimizer;
  // Throws c10::Error: their state is saved by DistributedOptimizer::save().
  void save(torch::serialize::OutputArchive&) const override { refuse("saved"); }
  // As save().
  void load(torch::serialize::InputArchive&) override { refuse("loaded"); }
  // Throws c10::Error for a gradient that cannot be stepped by rows; a step does before it changes
  // anything.
  static void check_rows(const at::Tensor& parameter, const at::Tensor& gradient);

 private:
  static void refuse(const char* what) {
    TORCH_CHECK(false, "a sparse optimizer cannot be ", what,
                " by itself; stitch::optim::DistributedOptimizer saves and loads its state");
  }
};
}  // namespace detail

// Options of SparseSGD.
struct SparseSGDOptions : torch::optim::OptimizerCloneableOptions<SparseSGDOptions> {
  // With that learning rate.
  SparseSGDOptions(double lr = 1e-3) : lr_(lr) {}
  // The learning rate.
  TORCH_ARG(double, lr) = 1e-3;

 public:
  // As lr(), for schedulers.
  double get_lr() const override { return lr(); }
  // As lr(value).
  void set_lr(const double value) override { lr(value); }
};

// w -= lr * g for the rows of the gradient: torch::optim::SGD without momentum and weight decay.
class SparseSGD : public detail::SparseOptimizer {
 public:
  // Throws c10::Error for options out of their range.
  explicit SparseSGD(std::vector<at::Tensor> parameters, SparseSGDOptions options = {});
  // Steps the parameters that have a `.grad`. Throws c10::Error for a gradient with more than one
  // sparse dimension, and for one of a parameter without dimensions. Returns what `closure`, called
  // first, has returned.
  at::Tensor step(LossClosure closure = nullptr) override;
};

// Options of SparseAdagrad.
struct SparseAdagradOptions : torch::optim::OptimizerCloneableOptions<SparseAdagradOptions> {
  // With that learning rate.
  SparseAdagradOptions(double lr = 1e-2) : lr_(lr) {}
  // The learning rate.
  TORCH_ARG(double, lr) = 1e-2;
  // The rate of step n is lr / (1 + (n - 1) * lr_decay).
  TORCH_ARG(double, lr_decay) = 0;
  // What a row's sum begins with.
  TORCH_ARG(double, initial_accumulator_value) = 0;
  // Added to the root of the sum.
  TORCH_ARG(double, eps) = 1e-10;
  // One sum for each row; false: one for each weight. The first step of a parameter decides.
  TORCH_ARG(bool, rowwise) = true;

 public:
  // As lr(), for schedulers.
  double get_lr() const override { return lr(); }
  // As lr(value).
  void set_lr(const double value) override { lr(value); }
};

// State of SparseAdagrad for a parameter.
struct SparseAdagradParamState
    : torch::optim::OptimizerCloneableParamState<SparseAdagradParamState> {
  // Steps so far.
  TORCH_ARG(std::int64_t, step) = 0;
  // One number for each row, or of the parameter's sizes.
  TORCH_ARG(at::Tensor, sum);
};

// Row-wise Adagrad, as FBGEMM's: s += mean(g * g); w -= rate * g / (sqrt(s) + eps), with one s for
// a row. With `rowwise` false it is torch::optim::Adagrad: s += g * g, one for each weight.
class SparseAdagrad : public detail::SparseOptimizer {
 public:
  // Throws c10::Error for options out of their range.
  explicit SparseAdagrad(std::vector<at::Tensor> parameters, SparseAdagradOptions options = {});
  // As SparseSGD::step().
  at::Tensor step(LossClosure closure = nullptr) override;
};

// Options of SparseAdam.
struct SparseAdamOptions : torch::optim::OptimizerCloneableOptions<SparseAdamOptions> {
  // With that learning rate.
  SparseAdamOptions(double lr = 1e-3) : lr_(lr) {}
  // The learning rate.
  TORCH_ARG(double, lr) = 1e-3;
  // What the averages of gradients and of their squares keep at a step.
  typedef std::tuple<double, double> betas_t;
  // See betas_t.
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  // Added to the root of the average of squares.
  TORCH_ARG(double, eps) = 1e-8;

 public:
  // As lr(), for schedulers.
  double get_lr() const override { return lr(); }
  // As lr(value).
  void set_lr(const double value) override { lr(value); }
};

// State of SparseAdam for a parameter.
struct SparseAdamParamState : torch::optim::OptimizerCloneableParamState<SparseAdamParamState> {
  // Steps so far, whatever rows they named.
  TORCH_ARG(std::int64_t, step) = 0;
  // The average of gradients.
  TORCH_ARG(at::Tensor, exp_avg);
  // The average of their squares.
  TORCH_ARG(at::Tensor, exp_avg_sq);
};

// torch.optim.SparseAdam of Python, which libtorch has no C++ for: Adam for the rows of the
// gradient. The averages of other rows do not decay.
class SparseAdam : public detail::SparseOptimizer {
 public:
  // Throws c10::Error for options out of their range.
  explicit SparseAdam(std::vector<at::Tensor> parameters, SparseAdamOptions options = {});
  // As SparseSGD::step().
  at::Tensor step(LossClosure closure = nullptr) override;
};

template <>
struct OptimizerTraits<SparseSGD> {
  using Options = SparseSGDOptions;
  static void options(auto& options, auto&& field) { field("lr", options.lr()); }
};

template <>
struct OptimizerTraits<SparseAdagrad> {
  using Options = SparseAdagradOptions;
  using State = SparseAdagradParamState;
  static void options(auto& options, auto&& field) {
    field("lr", options.lr());
    field("lr_decay", options.lr_decay());
    field("initial_accumulator_value", options.initial_accumulator_value());
    field("eps", options.eps());
    field("rowwise", options.rowwise());
  }
  static void state(auto& state, auto&& field) {
    field("step", state.step());
    field("sum", state.sum());
  }
  static at::IntArrayRef state_sizes(const at::Tensor& parameter) {
    return parameter.sizes().slice(0, 1);  // a number for each row
  }
};

template <>
struct OptimizerTraits<SparseAdam> {
  using Options = SparseAdamOptions;
  using State = SparseAdamParamState;
  static void options(auto& options, auto&& field) {
    field("lr", options.lr());
    field("betas", options.betas());
    field("eps", options.eps());
  }
  static void state(auto& state, auto&& field) {
    field("step", state.step());
    field("exp_avg", state.exp_avg());
    field("exp_avg_sq", state.exp_avg_sq());
  }
  static at::IntArrayRef state_sizes(const at::Tensor& parameter) { return parameter.sizes(); }
};

}  // namespace stitch::optim
