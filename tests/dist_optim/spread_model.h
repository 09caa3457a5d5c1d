#pragma once

#include "tests/support/world_test.h"

// A model of five parameters that are spread over owners, beside the same in one process.
namespace spread_model {

namespace autograd = stitch::dist_autograd;
using stitch::RRef;
using stitch::optim::DistributedOptimizer;
using stitch::optim::OptionsOf;

// One parameter, on its owner: a vector, or three rows of a table that are looked up.
class Holder {
 public:
  explicit Holder(at::Tensor initial) : parameter_(initial.clone().set_requires_grad(true)) {}
  RRef<at::Tensor> parameter() { return stitch::make_rref(parameter_); }
  at::Tensor times(const at::Tensor& x) { return parameter_ * x; }
  at::Tensor rows(const at::Tensor& ids) {
    return at::embedding(parameter_, ids, -1, /*scale_grad_by_freq=*/false, /*sparse=*/true);
  }
  at::Tensor now() { return parameter_.detach().clone(); }
  void assign(const at::Tensor& value) {
    const torch::NoGradGuard no_grad;
    parameter_.copy_(value);
  }

 private:
  at::Tensor parameter_;
};

inline constexpr std::size_t kParameters = 5;
inline at::Tensor initial(std::size_t which, at::ScalarType dtype) {
  return torch::linspace(0.5 + 0.1 * static_cast<double>(which), 1.5, 6, dtype);
}
inline at::Tensor loss_of(const std::vector<at::Tensor>& y) {
  return (y[0] * y[1]).sum() + y[2].pow(3).sum() + (y[3] * y[4]).sin().sum();
}

struct SpreadModel {
  // Parameter i is on worker 1 + i modulo `owners`.
  explicit SpreadModel(std::uint32_t owners, at::ScalarType dtype = at::kDouble) : dtype(dtype) {
    for (std::size_t i = 0; i < kParameters; ++i) {
      holders.push_back(
          stitch::remote<Holder>(stitch::WorkerId(1 + i % owners), initial(i, dtype)));
      references.push_back(holders.back().rpc_sync<&Holder::parameter>());
      here.push_back(initial(i, dtype).set_requires_grad(true));
    }
  }
  // Parameters 0 and 1 are one group, the others another.
  template <class T>
  static std::vector<T> first(const std::vector<T>& all) {
    return {all.begin(), all.begin() + 2};
  }
  template <class T>
  static std::vector<T> rest(const std::vector<T>& all) {
    return {all.begin() + 2, all.end()};
  }
  [[nodiscard]] at::Tensor input(int step) const {
    return torch::full({6}, 1 - 0.05 * step, dtype);
  }
  [[nodiscard]] at::Tensor loss_there(int step) const {
    std::vector<stitch::Future<at::Tensor>> parts;
    for (const auto& holder : holders)
      parts.push_back(holder.rpc_async<&Holder::times>(input(step)));
    return loss_of(stitch::when_all(std::move(parts)).get());
  }
  void backward_here(int step) const {
    std::vector<at::Tensor> parts;
    for (const auto& parameter : here) {
      parameter.mutable_grad() = at::Tensor();
      parts.push_back(parameter * input(step));
    }
    loss_of(parts).backward();
  }
  // Parameters are of the order of 1.
  void expect_equal(double tolerance) const {
    for (std::size_t i = 0; i < kParameters; ++i) {
      const auto there = holders[i].rpc_sync<&Holder::now>();
      EXPECT_TRUE(torch::allclose(there, here[i], tolerance, tolerance))
          << "parameter " << i << '\n'
          << there << here[i];
    }
  }

  at::ScalarType dtype;
  std::vector<RRef<Holder>> holders;
  std::vector<RRef<at::Tensor>> references;
  std::vector<at::Tensor> here;
};

// A step there, after the backward pass of step `i`, and one here.
template <class Optimizer>
using StepThere =
    std::function<void(DistributedOptimizer<Optimizer>&, const autograd::Context&, int i)>;
template <class Optimizer>
using StepHere = std::function<void(Optimizer&, const std::vector<at::Tensor>& parameters, int i)>;

// Over 1 to 4 owners, in fp64 and fp32, with two groups of these options.
template <class Optimizer>
void expect_same_training(const OptionsOf<Optimizer>& of_first, const OptionsOf<Optimizer>& of_rest,
                          const StepThere<Optimizer>& step_there,
                          const StepHere<Optimizer>& step_here) {
  SCOPED_TRACE(stitch::optim::optimizer_name<Optimizer>());
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    for (std::uint32_t owners = 1; owners <= 4; ++owners) {
      SCOPED_TRACE(std::to_string(owners) + " owners, " + at::toString(dtype));
      stitch::testing::Cluster cluster(owners + 1);
      const SpreadModel model(owners, dtype);
      DistributedOptimizer<Optimizer> there{
          {{.parameters = SpreadModel::first(model.references), .options = of_first},
           {.parameters = SpreadModel::rest(model.references), .options = of_rest}}};
      std::vector<torch::optim::OptimizerParamGroup> groups;
      groups.emplace_back(SpreadModel::first(model.here),
                          std::make_unique<OptionsOf<Optimizer>>(of_first));
      groups.emplace_back(SpreadModel::rest(model.here),
                          std::make_unique<OptionsOf<Optimizer>>(of_rest));
      Optimizer here(groups, of_first);
      for (int i = 0; i < 12; ++i) {
        {
          autograd::Context context;
          context.backward({model.loss_there(i)});
          step_there(there, context, i);
        }
        model.backward_here(i);
        step_here(here, model.here, i);
      }
      model.expect_equal(dtype == at::kDouble ? 1e-12 : 1e-6);
    }
  }
}

// The same for each of torch::optim's optimizers.
template <class There, class Here>
void expect_same_training_of_each(const There& step_there, const Here& step_here) {
  using namespace torch::optim;
  expect_same_training<SGD>(SGDOptions(0.05).momentum(0.9), SGDOptions(0.01).weight_decay(0.1),
                            step_there, step_here);
  expect_same_training<Adam>(AdamOptions(0.05).amsgrad(true), AdamOptions(0.01).eps(1e-3),
                             step_there, step_here);
  expect_same_training<AdamW>(AdamWOptions(0.05).weight_decay(0.3), AdamWOptions(0.01), step_there,
                              step_here);
  expect_same_training<Adagrad>(AdagradOptions(0.05).lr_decay(0.1), AdagradOptions(0.01),
                                step_there, step_here);
  expect_same_training<RMSprop>(RMSpropOptions(0.01).momentum(0.7), RMSpropOptions(0.02),
                                step_there, step_here);
}

}  // namespace spread_model
