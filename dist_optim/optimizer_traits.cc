#include "stitch/dist_optim/optimizer_traits.h"

#include "stitch/rpc/gpu/row_update.h"

namespace stitch::optim {

namespace {

using rpc::RowUpdate;

// The optimizer's only parameter, if a kernel may step it: the rest of what has to be so is asked
// in update_rows().
const at::Tensor* only_parameter(const torch::optim::Optimizer& optimizer) {
  const auto& groups = optimizer.param_groups();
  if (groups.size() != 1 || groups.front().params().size() != 1) return nullptr;
  const at::Tensor& parameter = groups.front().params().front();
  return parameter.is_cuda() && parameter.grad().defined() && parameter.grad().is_sparse()
             ? &parameter
             : nullptr;
}

template <class Optimizer>
const OptionsOf<Optimizer>& options_of(const Optimizer& optimizer) {
  return static_cast<const OptionsOf<Optimizer>&>(optimizer.param_groups().front().options());
}

}  // namespace

bool step_rows(torch::optim::SGD& optimizer) {
  const at::Tensor* const parameter = only_parameter(optimizer);
  if (parameter == nullptr) return false;
  const auto& options = options_of(optimizer);
  if (options.momentum() != 0 || options.weight_decay() != 0) return false;
  RowUpdate update;
  update.rule = RowUpdate::Rule::sgd;
  update.learning_rate = options.lr();
  return rpc::update_rows(*parameter, parameter->grad(), update);
}

bool step_rows(torch::optim::Adagrad& optimizer) {
  const at::Tensor* const parameter = only_parameter(optimizer);
  if (parameter == nullptr) return false;
  const auto& options = options_of(optimizer);
  auto* const state = static_cast<torch::optim::AdagradParamState*>(parameter_state(optimizer));
  if (options.weight_decay() != 0 || state == nullptr) return false;
  RowUpdate update;
  update.rule = RowUpdate::Rule::adagrad;
  update.learning_rate = options.lr();
  update.lr_decay = options.lr_decay();
  update.eps = options.eps();
  update.step = state->step() + 1;
  update.first_state = state->sum();
  if (!rpc::update_rows(*parameter, parameter->grad(), update)) return false;
  state->step(update.step);
  return true;
}

}  // namespace stitch::optim
