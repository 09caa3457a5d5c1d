#include "stitch/dist_optim/step_plan.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_set>

#include "stitch/dist_optim/distributed_optimizer.h"
#include "stitch/dist_optim/shadow_parameter.h"
#include "stitch/rpc/calls.h"

namespace stitch::optim {

namespace detail {

namespace {

// Calls use(parameter, gradient) for each parameter that has one, once.
template <class Use>
void for_each_gradient(const dist_autograd::ContextId& id, const Owned& owned, const Use& use) {
  const auto context = dist_autograd::find_usable_context(id);
  if (!context) return;
  const at::NoGradGuard no_grad;
  std::unordered_set<const void*> seen;
  for (const auto& each : owned) {
    for (const at::Tensor& parameter : each.local_value().get()) {
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      const at::Tensor gradient = context->stored_gradient(parameter);
      if (gradient.defined()) use(*context, parameter, gradient);
    }
  }
}

}  // namespace

// These run on each owner. What it finds, with the square of the norm.
Findings look_at_gradients_here(const dist_autograd::ContextId& id, const Owned& owned) {
  Findings found;
  std::map<std::string, std::vector<at::Tensor>> by_device;  // so that each is read once
  for_each_gradient(
      id, owned, [&](const auto& context, const at::Tensor& parameter, const at::Tensor& gradient) {
        found.staleness = std::max(found.staleness, steps_since(parameter, context.steps_before()));
        const at::Tensor values = gradient.is_sparse() ? gradient.coalesce().values() : gradient;
        const bool narrow =
            values.scalar_type() == at::kHalf || values.scalar_type() == at::kBFloat16;
        const at::Tensor norm = narrow ? at::norm(values, 2, at::kFloat) : at::norm(values, 2);
        by_device[norm.device().str()].push_back(norm.to(at::kDouble));
      });
  for (const auto& [device, norms] : by_device)
    found.norm += at::stack(norms).square().sum().item<double>();
  return found;
}
void scale_owned_here(const dist_autograd::ContextId& id, const Owned& owned, double factor) {
  for_each_gradient(id, owned, [&](const auto& context, const at::Tensor& parameter, const auto&) {
    context.change_gradient(parameter, [&](const at::Tensor& kept) { return kept * factor; });
  });
}
void limit_owned_here(const dist_autograd::ContextId& id, const Owned& owned, double limit) {
  for_each_gradient(id, owned, [&](const auto& context, const at::Tensor& parameter, const auto&) {
    context.change_gradient(parameter, [&](const at::Tensor& kept) {
      if (!kept.is_sparse()) return kept.clamp(-limit, limit);
      const at::Tensor once = kept.coalesce();
      return at::_sparse_coo_tensor_unsafe(once.indices(), once.values().clamp(-limit, limit),
                                           once.sizes(), once.options())
          ._coalesced_(true);
    });
  });
}

}  // namespace detail

namespace {

// Calls F on each owner with what is there.
template <auto F, class... Arguments>
auto on_owners(const dist_autograd::ContextId& context, const Owned& owned,
               std::optional<std::chrono::nanoseconds> timeout, Arguments... arguments) {
  std::map<WorkerId, Owned> by_owner;
  for (const auto& each : owned) by_owner[each.owner().id].push_back(each);
  std::vector<decltype(rpc_async<F>(TargetOptions{WorkerId(0)}, context, owned, arguments...))>
      results;
  for (const auto& [owner, there] : by_owner) {
    TargetOptions target{.to = owner, .timeout = timeout};
    results.push_back(rpc_async<F>(std::move(target), context, there, arguments...));
  }
  return when_all(std::move(results));
}

Owned owned_by(const Optimizers& optimizers) {
  Owned all;
  for (const auto* optimizer : optimizers) {
    const auto owned = optimizer->owned();
    all.insert(all.end(), owned.begin(), owned.end());
  }
  return all;
}

// Some gradients have been changed when it fails, and others not.
template <auto F>
void change(const dist_autograd::ContextHandle& context, const Owned& owned, double argument) {
  try {
    on_owners<F>(context.id(), owned, std::nullopt, argument).get();
  } catch (...) {
    context.fail(to_error(std::current_exception()));
    throw;
  }
}

}  // namespace

void check_limit(const char* what, double limit) {
  if (limit >= 0) return;
  throw Error(ErrorCode::invalid_argument, std::string(what) + " of " + std::to_string(limit) +
                                               " is refused: it must be 0 or more");
}

double clip_factor(double norm, double max_norm) { return std::min(1.0, max_norm / (norm + 1e-6)); }

Future<Findings> look_at_gradients(const dist_autograd::ContextId& context, const Owned& owned,
                                   StepPlan::Timeout timeout) {
  return on_owners<detail::look_at_gradients_here>(context, owned, timeout)
      .then([](const std::vector<Findings>& found) {
        Findings all;
        for (const Findings& each : found) {
          all.norm += each.norm;
          all.staleness = std::max(all.staleness, each.staleness);
        }
        all.norm = std::sqrt(all.norm);
        return all;
      });
}

double clip_grad_norm(const dist_autograd::ContextHandle& context, const Optimizers& optimizers,
                      double max_norm) {
  check_limit("max_norm", max_norm);
  context.throw_if_unusable();
  const auto owned = owned_by(optimizers);
  const double norm = look_at_gradients(context.id(), owned, std::nullopt).get().norm;
  const double factor = clip_factor(norm, max_norm);
  if (std::isfinite(norm) && factor < 1) change<detail::scale_owned_here>(context, owned, factor);
  return norm;
}

void clip_grad_value(const dist_autograd::ContextHandle& context, const Optimizers& optimizers,
                     double limit) {
  check_limit("limit", limit);
  context.throw_if_unusable();
  change<detail::limit_owned_here>(context, owned_by(optimizers), limit);
}

}  // namespace stitch::optim
