#include "stitch/dist_optim/grad_scaler.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <string>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/dist_autograd/context.h"

namespace stitch::optim {

namespace {
constexpr std::size_t kContexts = 1024;  // whose factors are remembered

void check(bool good, const char* name, double value) {
  if (good && std::isfinite(value)) return;
  throw Error(ErrorCode::invalid_argument, "GradScaler: " + std::string(name) + " of " +
                                               std::to_string(value) + " is out of its range");
}
}  // namespace

struct GradScaler::Shared {
  explicit Shared(const GradScalerOptions& given) : options(given), state{given.scale, 0} {}
  // Null: the context has none.
  const double* factor_of(const dist_autograd::ContextId& context) const STITCH_REQUIRES(mutex) {
    const auto found = std::find_if(factors.rbegin(), factors.rend(),
                                    [&](const auto& each) { return each.first == context; });
    return found == factors.rend() ? nullptr : &found->second;
  }
  const GradScalerOptions options;
  base::Mutex mutex;  // taken alone
  State state STITCH_GUARDED_BY(mutex);
  // As contexts were given them, the newest last.
  std::deque<std::pair<dist_autograd::ContextId, double>> factors STITCH_GUARDED_BY(mutex);
};

GradScaler::GradScaler(const GradScalerOptions& options)
    : shared_(std::make_shared<Shared>(options)) {
  check(options.scale > 0, "scale", options.scale);
  check(options.growth >= 1, "growth", options.growth);
  check(options.backoff > 0 && options.backoff <= 1, "backoff", options.backoff);
  check(options.interval >= 1, "interval", static_cast<double>(options.interval));
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  if (!dist_autograd::has_current_context()) return loss * scale_factor();
  const auto context = dist_autograd::current_context().id();
  double factor = 0;
  {
    base::MutexLock lock(shared_->mutex);
    const double* const known = shared_->factor_of(context);
    factor = known != nullptr ? *known : shared_->state.scale;
    auto& factors = shared_->factors;
    if (known == nullptr) factors.emplace_back(context, factor);
    if (factors.size() > kContexts) factors.pop_front();
  }
  return loss * factor;
}

double GradScaler::scale_factor() const { return state().scale; }

GradScaler::State GradScaler::state() const {
  base::MutexLock lock(shared_->mutex);
  return shared_->state;
}

void GradScaler::set_state(const State& state) const {
  check(state.scale > 0, "scale", state.scale);
  base::MutexLock lock(shared_->mutex);
  shared_->state = state;
}

double GradScaler::factor_of(const dist_autograd::ContextId& context) const {
  base::MutexLock lock(shared_->mutex);
  const double* const known = shared_->factor_of(context);
  return known != nullptr ? *known : shared_->state.scale;
}

void GradScaler::update(bool finite) const {
  const GradScalerOptions& options = shared_->options;
  base::MutexLock lock(shared_->mutex);
  State& state = shared_->state;
  if (!finite) {
    state = {state.scale * options.backoff, 0};
  } else if (++state.good_steps >= options.interval) {
    const double grown = state.scale * options.growth;
    state = {std::isfinite(grown) ? grown : state.scale, 0};
  }
}

}  // namespace stitch::optim
