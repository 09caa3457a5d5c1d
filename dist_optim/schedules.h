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

// ReduceLROnPlateau.
struct PlateauOptions {
  double factor = 0.1;             // by which the rate is multiplied; below 1
  std::int64_t patience = 10;      // observations without a better metric that change nothing
  double threshold = 1e-4;         // by more than this part of it is a better metric below the best
  bool absolute = false;           // by more than this number
  bool greater_is_better = false;  // as of an accuracy
  std::int64_t cooldown = 0;       // observations after a reduction that do not count
  double min = 0;                  // of the product
};
// By what the learning rate is multiplied, from a metric: reduced once it has got no better for a
// while. `optimizer.set_lr(rate * plateau.observe(loss))`. Thread contract: one thread.
class Plateau {
 public:
  // For a checkpoint.
  struct State {
    double factor = 1;          // the last one returned
    double best = 0;            // metric; infinite before the first
    std::int64_t bad = 0;       // observations since
    std::int64_t cooldown = 0;  // left
  };
  // Throws Error(invalid_argument) for options out of their range.
  explicit Plateau(const PlateauOptions& options = {});
  // Takes the metric of an epoch and returns the factor from now on. NaN is no better than any.
  double observe(double metric);
  // After the last metric.
  [[nodiscard]] const State& state() const noexcept { return state_; }
  // One that state() returned: the next metric follows it.
  void set_state(const State& state) { state_ = state; }

 private:
  PlateauOptions options_;
  State state_;
};

// What a schedule says of a step. Throws Error(invalid_argument) for less than 0, an infinity or
// NaN.
[[nodiscard]] double checked_rate(double rate, std::int64_t step);

}  // namespace stitch::optim
