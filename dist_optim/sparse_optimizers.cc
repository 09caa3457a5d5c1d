#include "stitch/dist_optim/sparse_optimizers.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>

#include "stitch/dist_optim/sparse_rows.h"

namespace stitch::optim {

namespace {

using torch::optim::OptimizerParamGroup;

void check_positive(const char* what, double value) {
  TORCH_CHECK(value >= 0, what, " of ", value, " is refused: it must be 0 or more");
}

// Calls step(parameter, options) for each parameter that has a gradient, once all are checked.
template <class Options, class Step>
at::Tensor step_each(torch::optim::Optimizer& optimizer,
                     const torch::optim::Optimizer::LossClosure& closure, const Step& step) {
  at::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode enabled(true);
    loss = closure();
  }
  const at::NoGradGuard no_grad;
  const auto each = [&](const auto& use) {
    for (auto& group : optimizer.param_groups()) {
      const auto& options = static_cast<const Options&>(group.options());
      for (at::Tensor& parameter : group.params()) {
        if (parameter.grad().defined()) use(parameter, options);
      }
    }
  };
  each([](const at::Tensor& parameter, const Options&) {
    detail::SparseOptimizer::check_rows(parameter, parameter.grad());
  });
  each([&](const at::Tensor& parameter, const Options& options) {
    if (parameter.numel() > 0) step(parameter, options);
  });
  return loss;
}

// The state that `optimizer` has for `parameter`, made by make() if there is none.
template <class State, class Make>
State& state_of(torch::optim::Optimizer& optimizer, const at::Tensor& parameter, const Make& make) {
  auto& kept = optimizer.state()[state_key(optimizer, parameter)];
  if (!kept) kept = std::make_unique<State>(make());
  return static_cast<State&>(*kept);
}

at::TensorOptions state_options(const at::Tensor& parameter) {
  return parameter.options().dtype(state_type(parameter));
}

}  // namespace

void detail::SparseOptimizer::check_rows(const at::Tensor& parameter, const at::Tensor& gradient) {
  TORCH_CHECK(parameter.dim() > 0, "a parameter without dimensions has no rows to step");
  TORCH_CHECK(!parameter.is_complex(), "a complex parameter cannot be stepped by rows");
  TORCH_CHECK(gradient.sizes() == parameter.sizes(), "a gradient of shape ", gradient.sizes(),
              " does not fit a parameter of shape ", parameter.sizes());
  TORCH_CHECK(!gradient.is_sparse() || gradient.sparse_dim() == 1, "a gradient with ",
              gradient.sparse_dim(),
              " sparse dimensions cannot be stepped by rows, only one with 1");
}

SparseSGD::SparseSGD(std::vector<at::Tensor> parameters, SparseSGDOptions options)
    : SparseOptimizer({OptimizerParamGroup(std::move(parameters))},
                      std::make_unique<SparseSGDOptions>(options)) {
  check_positive("a learning rate", options.lr());
}

at::Tensor SparseSGD::step(LossClosure closure) {
  const auto step = [](const at::Tensor& parameter, const SparseSGDOptions& options) {
    step_rows(parameter, parameter.grad(), {.kind = RowRule::Kind::sgd, .rate = options.lr()});
  };
  return step_each<SparseSGDOptions>(*this, closure, step);
}

SparseAdagrad::SparseAdagrad(std::vector<at::Tensor> parameters, SparseAdagradOptions options)
    : SparseOptimizer({OptimizerParamGroup(std::move(parameters))},
                      std::make_unique<SparseAdagradOptions>(options)) {
  check_positive("a learning rate", options.lr());
  check_positive("an lr_decay", options.lr_decay());
  check_positive("an initial_accumulator_value", options.initial_accumulator_value());
  check_positive("an eps", options.eps());
}

at::Tensor SparseAdagrad::step(LossClosure closure) {
  const auto step = [this](const at::Tensor& parameter, const SparseAdagradOptions& options) {
    auto& state = state_of<SparseAdagradParamState>(*this, parameter, [&] {
      return SparseAdagradParamState().sum(
          at::full(parameter.sizes().slice(0, options.rowwise() ? 1 : parameter.dim()),
                   options.initial_accumulator_value(), state_options(parameter)));
    });
    const auto before = static_cast<double>(state.step());
    step_rows(
        parameter, parameter.grad(),
        {.kind = state.sum().dim() == 1 ? RowRule::Kind::rowwise_adagrad : RowRule::Kind::adagrad,
         .rate = options.lr() / (1 + before * options.lr_decay()),
         .eps = options.eps()},
        state.sum());
    state.step(state.step() + 1);
  };
  return step_each<SparseAdagradOptions>(*this, closure, step);
}

SparseAdam::SparseAdam(std::vector<at::Tensor> parameters, SparseAdamOptions options)
    : SparseOptimizer({OptimizerParamGroup(std::move(parameters))},
                      std::make_unique<SparseAdamOptions>(options)) {
  check_positive("a learning rate", options.lr());
  check_positive("an eps", options.eps());
  const auto [beta1, beta2] = options.betas();
  TORCH_CHECK(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, "betas of ", beta1, " and ",
              beta2, " are refused: they must be 0 or more, and less than 1");
}

at::Tensor SparseAdam::step(LossClosure closure) {
  const auto step = [this](const at::Tensor& parameter, const SparseAdamOptions& options) {
    auto& state = state_of<SparseAdamParamState>(*this, parameter, [&] {
      const auto zeros = [&] { return at::zeros(parameter.sizes(), state_options(parameter)); };
      return SparseAdamParamState().exp_avg(zeros()).exp_avg_sq(zeros());
    });
    const auto [beta1, beta2] = options.betas();
    const auto power = static_cast<double>(state.step() + 1);
    step_rows(parameter, parameter.grad(),
              {.kind = RowRule::Kind::adam,
               .rate = options.lr() * std::sqrt(1 - std::pow(beta2, power)) /
                       (1 - std::pow(beta1, power)),
               .eps = options.eps(),
               .approach_first = 1 - beta1,
               .approach_second = 1 - beta2},
              state.exp_avg(), state.exp_avg_sq());
    state.step(state.step() + 1);
  };
  return step_each<SparseAdamOptions>(*this, closure, step);
}

}  // namespace stitch::optim
