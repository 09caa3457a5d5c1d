#include "stitch/dist_optim/schedules.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <sstream>
#include <utility>

#include "stitch/base/error.h"

namespace stitch::optim {

namespace {

[[noreturn]] void refuse(const char* what, double given, const char* rule) {
  std::ostringstream text;
  text << "schedule with " << what << " of " << given << " is refused: it must be " << rule;
  throw Error(ErrorCode::invalid_argument, text.str());
}
double factor_checked(const char* what, double factor) {
  if (!(factor >= 0) || std::isinf(factor)) refuse(what, factor, "a number of 0 or more");
  return factor;
}
std::int64_t steps_checked(std::int64_t steps) {
  if (steps < 1) refuse("steps", static_cast<double>(steps), "1 or more");
  return steps;
}

Schedule warmed_up(std::int64_t warm_up, Schedule then) {
  if (warm_up < 0) refuse("warm_up", static_cast<double>(warm_up), "0 or more");
  return [warm_up, then = std::move(then)](std::int64_t step) {
    if (step >= warm_up) return then(step - warm_up);
    return then(0) * (static_cast<double>(step) + 1) / (static_cast<double>(warm_up) + 1);
  };
}

// Half a cosine, at `part` of the way.
double between(double first, double last, double part) {
  return last + (first - last) / 2 * (1 + std::cos(std::numbers::pi * part));
}

}  // namespace

Schedule constant(const ConstantSchedule& options) {
  return warmed_up(options.warm_up, [](std::int64_t) { return 1.0; });
}

Schedule linear(const LinearSchedule& options) {
  return warmed_up(options.warm_up, [steps = steps_checked(options.steps),
                                     first = factor_checked("first", options.first),
                                     last = factor_checked("last", options.last)](std::int64_t n) {
    if (n >= steps) return last;
    return first + (last - first) * static_cast<double>(n) / static_cast<double>(steps);
  });
}

Schedule step(const StepSchedule& options) {
  return warmed_up(
      options.warm_up,
      [steps = steps_checked(options.steps), factor = factor_checked("factor", options.factor)](
          std::int64_t n) { return std::pow(factor, static_cast<double>(n / steps)); });
}

Schedule exponential(const ExponentialSchedule& options) {
  return warmed_up(options.warm_up,
                   [factor = factor_checked("factor", options.factor)](std::int64_t n) {
                     return std::pow(factor, static_cast<double>(n));
                   });
}

Schedule cosine(const CosineSchedule& options) {
  return warmed_up(options.warm_up, [steps = steps_checked(options.steps),
                                     last = factor_checked("last", options.last)](std::int64_t n) {
    return between(1, last, static_cast<double>(std::min(n, steps)) / static_cast<double>(steps));
  });
}

Schedule one_cycle(const OneCycleSchedule& options) {
  const double end = static_cast<double>(steps_checked(options.steps) - 1);
  const double top = options.rise * static_cast<double>(options.steps) - 1;
  if (!(top > 0 && top < end)) refuse("rise", options.rise, "such that it and the fall have steps");
  return warmed_up(options.warm_up, [end, top, first = factor_checked("first", options.first),
                                     last = factor_checked("last", options.last)](std::int64_t n) {
    const double at = std::min(static_cast<double>(n), end);
    if (at <= top) return between(first, 1, at / top);
    return between(1, last, (at - top) / (end - top));
  });
}

Plateau::Plateau(const PlateauOptions& options) : options_(options) {
  if (!(factor_checked("factor", options.factor) < 1))
    refuse("factor", options.factor, "less than 1");
  if (options.patience < 0) refuse("patience", static_cast<double>(options.patience), "0 or more");
  if (options.cooldown < 0) refuse("cooldown", static_cast<double>(options.cooldown), "0 or more");
  static_cast<void>(factor_checked("threshold", options.threshold));
  static_cast<void>(factor_checked("min", options.min));
  state_.best = std::numeric_limits<double>::infinity() * (options.greater_is_better ? -1 : 1);
}

double Plateau::observe(double metric) {
  const double sign = options_.greater_is_better ? 1 : -1;
  const double limit = options_.absolute ? state_.best + sign * options_.threshold
                                         : state_.best * (1 + sign * options_.threshold);
  if (options_.greater_is_better ? metric > limit : metric < limit) {
    state_.best = metric;
    state_.bad = 0;
  } else {
    ++state_.bad;
  }
  if (state_.cooldown > 0) {
    --state_.cooldown;
    state_.bad = 0;
  }
  if (state_.bad > options_.patience) {
    state_.factor = std::max(state_.factor * options_.factor, options_.min);
    state_.cooldown = options_.cooldown;
    state_.bad = 0;
  }
  return state_.factor;
}

double checked_rate(double rate, std::int64_t step) {
  if (std::isfinite(rate) && rate >= 0) return rate;
  throw Error(ErrorCode::invalid_argument, "schedule returns " + std::to_string(rate) +
                                               " for step " + std::to_string(step) +
                                               "; it takes a finite number of at least 0");
}

}  // namespace stitch::optim
