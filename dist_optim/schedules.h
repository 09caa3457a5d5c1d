#pragma once

#include <cstdint>
#include <functional>

namespace stitch::optim {

// By what the learning rate of each group is multiplied in a step, from the number of the step,
// which counts from 0: for DistributedOptimizer::set_schedule(), which sends it with the step. A
// function of one's own must be pure, so that a restart lands on the same rate. The functions below
// make those of torch.optim.lr_scheduler; where an option is out of its range they throw
// Error(invalid_argument). Each has a warm-up in front of it if asked: (step + 1) / (warm_up + 1)
// of its first value, as LinearLR has; its own steps are counted from the end of that. Thread
// contract: any thread.
using Schedule = std::function<double(std::int64_t step)>;

// 1 throughout.
struct ConstantSchedule {
  std::int64_t warm_up = 0;  // steps
};
// With these options.
[[nodiscard]] Schedule constant(const ConstantSchedule& options);

// LinearLR: from `first` to `last` within `steps` steps, then `last`.
struct LinearSchedule {
  std::int64_t warm_up = 0;  // steps
  std::int64_t steps = 0;    // from the first value to the last
  double first = 1;          // value
  double last = 0;           // value
};
// With these options.
[[nodiscard]] Schedule linear(const LinearSchedule& options);

// StepLR: multiplied by `factor` every `steps` steps.
struct StepSchedule {
  std::int64_t warm_up = 0;  // steps
  std::int64_t steps = 0;    // with the same value
  double factor = 0.1;       // from one of them to the next
};
// With these options.
[[nodiscard]] Schedule step(const StepSchedule& options);

// ExponentialLR: multiplied by `factor` in each step.
struct ExponentialSchedule {
  std::int64_t warm_up = 0;  // steps
  double factor = 1;         // from each step to the next
};
// With these options.
[[nodiscard]] Schedule exponential(const ExponentialSchedule& options);

// CosineAnnealingLR: half a cosine from 1 to `last` within `steps` steps, then `last`.
struct CosineSchedule {
  std::int64_t warm_up = 0;  // steps
  std::int64_t steps = 0;    // from 1 to the last value
  double last = 0;           // value
};
// With these options.
[[nodiscard]] Schedule cosine(const CosineSchedule& options);

// OneCycleLR, without its cycle of momentum: half a cosine from `first` to 1 within the part `rise`
// of `steps` steps, and another from there to `last`; the rate of a group is the highest.
struct OneCycleSchedule {
  std::int64_t warm_up = 0;      // steps
  std::int64_t steps = 0;        // in all
  double rise = 0.3;             // part of them that leads up
  double first = 1.0 / 25;       // value
  double last = 1.0 / 25 / 1e4;  // value
};
// With these options.
[[nodiscard]] Schedule one_cycle(const OneCycleSchedule& options);

// What a schedule says of a step. Throws Error(invalid_argument) for less than 0, an infinity or
// NaN.
[[nodiscard]] double checked_rate(double rate, std::int64_t step);

}  // namespace stitch::optim
