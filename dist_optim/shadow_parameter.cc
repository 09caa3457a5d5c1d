#include "stitch/dist_optim/shadow_parameter.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <sstream>
#include <unordered_map>

#include "stitch/base/error.h"
#include "stitch/dist_autograd/graph/device_order.h"
#include "stitch/dist_autograd/graph/optimizers_step.h"

namespace stitch::optim {

namespace {

struct Locks {
  base::Mutex mutex;
  // By the tensor's identity. An entry without holders is stale: its address may belong to another
  // tensor by now, for which any unheld mutex is as good.
  std::unordered_map<const void*, std::weak_ptr<base::Mutex>> by_parameter STITCH_GUARDED_BY(mutex);
  // Stale entries are taken out when the table has doubled: a constant cost for each new one.
  std::size_t sweep_at STITCH_GUARDED_BY(mutex) = 64;
};

Locks& locks() {
  static auto* const all =
      new Locks;  // never destroyed: optimizers may outlive other static objects
  return *all;
}

// data() has a version counter of its own, detach() the parameter's.
at::Tensor make_shadow(const at::Tensor& parameter, StalePolicy policy) {
  at::Tensor shadow = policy == StalePolicy::allow ? parameter.data() : parameter.detach();
  // What cannot have a gradient (a frozen tensor of integers) is never stepped.
  return shadow.set_requires_grad(shadow.is_floating_point() || shadow.is_complex());
}

}  // namespace

std::shared_ptr<base::Mutex> parameter_lock(const at::Tensor& parameter) {
  Locks& all = locks();
  base::MutexLock lock(all.mutex);
  auto& entry = all.by_parameter[parameter.unsafeGetTensorImpl()];
  auto mutex = entry.lock();
  if (!mutex) {
    mutex = std::make_shared<base::Mutex>();
    entry = mutex;
    if (all.by_parameter.size() >= all.sweep_at) {
      std::erase_if(all.by_parameter, [](const auto& each) { return each.second.expired(); });
      all.sweep_at = std::max<std::size_t>(64, 2 * all.by_parameter.size());
    }
  }
  return mutex;
}

ShadowParameter::ShadowParameter(at::Tensor parameter, StalePolicy policy)
    : parameter_(std::move(parameter)),
      policy_(policy),
      lock_(parameter_lock(parameter_)),
      shadow_(make_shadow(parameter_, policy)) {}

void ShadowParameter::check(const at::Tensor& gradient, std::string_view name) const {
  if (gradient.sizes() == parameter_.sizes()) return;
  std::ostringstream text;
  text << "gradient of shape " << gradient.sizes() << " does not fit parameter \"" << name
       << "\" of shape " << parameter_.sizes();
  throw Error(ErrorCode::invalid_argument, text.str());
}

void ShadowParameter::begin_step(const at::Tensor& gradient, std::string_view name) {
  check(gradient, name);
  // Moving or loading a module gives its parameters new memory.
  if (!shadow_.is_alias_of(parameter_))
    shadow_.set_data(policy_ == StalePolicy::allow ? parameter_.data() : parameter_.detach());
  // Its memory may belong to the stream of the pass, and the context may drop it before the step
  // on this one has read it.
  if (dist_autograd::is_on_device(gradient))
    dist_autograd::keep_for(gradient, dist_autograd::current_stream(gradient.device()));
  shadow_.mutable_grad() = gradient;
}

void ShadowParameter::end_step(bool bump_version) {
  shadow_.mutable_grad() = at::Tensor();
  if (policy_ != StalePolicy::detect) return;
  dist_autograd::optimizers_step_here = true;
  if (bump_version) torch::autograd::impl::bump_version(parameter_);
}

}  // namespace stitch::optim
