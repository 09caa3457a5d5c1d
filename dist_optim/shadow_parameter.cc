#include "stitch/dist_optim/shadow_parameter.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <sstream>

#include "stitch/base/error.h"
#include "stitch/dist_autograd/graph/device_order.h"
#include "stitch/dist_autograd/graph/optimizers_step.h"
#include "stitch/dist_optim/named_values.h"
#include "stitch/rpc/future/blocking_region.h"
#include "stitch/rref/parameter_lock.h"
#include "stitch/rref/shared_parameter.h"

namespace stitch::optim {

namespace {

// data() has a version counter of its own, detach() the parameter's.
at::Tensor make_shadow(const at::Tensor& parameter, StalePolicy policy) {
  at::Tensor shadow = policy == StalePolicy::allow ? parameter.data() : parameter.detach();
  // What cannot have a gradient (a frozen tensor of integers) is never stepped.
  return shadow.set_requires_grad(shadow.is_floating_point() || shadow.is_complex());
}

std::shared_ptr<std::shared_mutex> readers_of(const at::Tensor& leaf) {
  auto shared = rref::find_shared_parameter(leaf);
  if (!shared || !shared->detects) return nullptr;
  auto* const readers = &shared->readers;
  return {std::move(shared), readers};
}

}  // namespace

std::shared_ptr<base::Mutex> parameter_lock(const at::Tensor& parameter) {
  return rref::parameter_lock(parameter);
}

std::int64_t steps_since(const at::Tensor& parameter, std::uint64_t then) {
  const auto shared = rref::shared_parameter(parameter);
  base::MutexLock lock(shared->mutex);
  return shared->steps.end() - std::upper_bound(shared->steps.begin(), shared->steps.end(), then);
}

ShadowParameter::ShadowParameter(at::Tensor parameter, StalePolicy policy, bool steps_rows)
    : parameter_(std::move(parameter)),
      policy_(policy),
      shared_(rref::shared_parameter(parameter_)),
      has_master_(
          !steps_rows && parameter_.requires_grad() &&
          (parameter_.scalar_type() == at::kHalf || parameter_.scalar_type() == at::kBFloat16)) {
  base::MutexLock lock(shared_->mutex);
  shadow_ = make_shadow(stepped_memory(), policy);
  if (policy != StalePolicy::detect) return;
  shared_->detects = true;
  dist_autograd::mutex_of_leaf = &readers_of;
}

base::Mutex& ShadowParameter::lock() const noexcept { return shared_->mutex; }

const at::Tensor& ShadowParameter::stepped_memory() {
  if (!has_master_) return parameter_;
  shared_->mutex.assert_held();
  const at::NoGradGuard no_grad;
  const at::Tensor now = parameter_.detach();
  at::Tensor& master = shared_->master;
  if (!master.defined() || master.device() != now.device() || master.sizes() != now.sizes()) {
    master = now.to(at::kFloat);
  } else if (shared_->version != now._version() || shared_->memory != now.data_ptr()) {
    master.copy_(at::where(master.to(now.scalar_type()) == now, master, now.to(at::kFloat)));
  }
  shared_->version = static_cast<std::uint32_t>(now._version());
  shared_->memory = now.data_ptr();
  return master;
}

void ShadowParameter::check(const at::Tensor& gradient, std::string_view name) const {
  if (gradient.sizes() == parameter_.sizes()) return;
  std::ostringstream text;
  text << "gradient of shape " << gradient.sizes() << " does not fit parameter \"" << name
       << "\" of shape " << parameter_.sizes();
  throw Error(ErrorCode::invalid_argument, text.str());
}

void ShadowParameter::begin_step(at::Tensor gradient, double scale, std::string_view name) {
  check(gradient, name);
  // Moving or loading a module gives its parameters new memory.
  const at::Tensor& memory = stepped_memory();
  if (!shadow_.is_alias_of(memory))
    shadow_.set_data(policy_ == StalePolicy::allow ? memory.data() : memory.detach());
  // Its memory may belong to the stream of the pass, and the context may drop it before the step
  // on this one has read it.
  if (dist_autograd::is_on_device(gradient))
    dist_autograd::keep_for(gradient, dist_autograd::current_stream(gradient.device()));
  const at::NoGradGuard no_grad;
  // A scaled gradient in half precision would vanish when it is divided again.
  if (has_master_ || (scale != 1 && gradient.scalar_type() == parameter_.scalar_type()))
    gradient = gradient.to(state_type(parameter_));
  if (scale != 1) gradient = gradient * scale;
  shadow_.mutable_grad() = gradient;
  if (policy_ != StalePolicy::detect || shared_->readers.try_lock()) return;
  const BlockingRegion waiting;
  shared_->readers.lock();
}

void ShadowParameter::end_step(bool bump_version) {
  shared_->mutex.assert_held();
  std::unique_lock<std::shared_mutex> readers;
  if (policy_ == StalePolicy::detect) readers = {shared_->readers, std::adopt_lock};
  shadow_.mutable_grad() = at::Tensor();
  write_back();
  if (!has_master_) shared_->master = at::Tensor();  // of others
  shared_->steps.push_back(++dist_autograd::optimizer_steps);
  if (shared_->steps.size() > kStepsKept) shared_->steps.pop_front();
  if (policy_ != StalePolicy::detect) return;
  dist_autograd::optimizers_step_here = true;
  if (bump_version && !has_master_) torch::autograd::impl::bump_version(parameter_);
}

// Counts up the version of the parameter, where that is wanted.
void ShadowParameter::write_back() {
  if (!has_master_) return;
  shared_->mutex.assert_held();
  const at::NoGradGuard no_grad;
  const at::Tensor now = policy_ == StalePolicy::allow ? parameter_.data() : parameter_.detach();
  now.copy_(shared_->master);
  shared_->version = static_cast<std::uint32_t>(parameter_._version());
}

at::Tensor ShadowParameter::master() const {
  shared_->mutex.assert_held();
  return has_master_ ? shared_->master : at::Tensor();
}

void ShadowParameter::set_master(const at::Tensor& saved) {
  if (!has_master_) return;
  shared_->mutex.assert_held();
  shared_->master.copy_(saved);
  shared_->memory = nullptr;  // the next step keeps it where its rounding is the parameter
}

}  // namespace stitch::optim
