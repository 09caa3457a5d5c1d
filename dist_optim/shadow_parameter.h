#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string_view>

#include "stitch/base/mutex.h"
#include "stitch/dist_optim/steps.h"

namespace stitch::rref {
struct SharedParameter;
}

namespace stitch::optim {

// How often optimizers have stepped `parameter` since optimizer_steps was `then`, kStepsKept at
// most. Thread contract: any thread.
inline constexpr std::int64_t kStepsKept = 256;
[[nodiscard]] std::int64_t steps_since(const at::Tensor& parameter, std::uint64_t then);

// A parameter as a torch::optim optimizer sees it: a leaf of its own (the shadow) that shares the
// parameter's memory and carries the gradient of one context for one step. So the
// parameter's `.grad` is never touched. The shadow of a parameter in half precision is a master
// copy in fp32, one for all optimizers of this process: gradients are converted for it, and after a
// step the parameter gets its rounding. Where the parameter is not that, because others have
// written it, the master is read from it again. Optimizers of rows step the parameter itself.
// Thread contract: REQUIRES lock() held, except for lock() itself.
class ShadowParameter {
 public:
  ShadowParameter(at::Tensor parameter, StalePolicy policy, bool steps_rows);

  [[nodiscard]] base::Mutex& lock() const noexcept;
  [[nodiscard]] const at::Tensor& parameter() const noexcept { return parameter_; }
  [[nodiscard]] const at::Tensor& shadow() const noexcept { return shadow_; }
  // Throws Error(invalid_argument) naming the parameter when the gradient's shape is not its own.
  // Needs no lock.
  void check(const at::Tensor& gradient, std::string_view name) const;
  // Checks `gradient` and puts it on the shadow, multiplied by `scale`.
  void begin_step(at::Tensor gradient, double scale, std::string_view name);
  // Takes the gradient off again, even where it throws: a device may have failed. `bump_version`:
  // the optimizer did not tell libtorch that the parameter changed.
  void end_step(bool bump_version);
  // The master copy; undefined when there is none.
  [[nodiscard]] at::Tensor master() const;
  // A copy of `saved` becomes the master, unless there is none.
  void set_master(const at::Tensor& saved);

 private:
  // The memory that is stepped, up to date.
  [[nodiscard]] const at::Tensor& stepped_memory();
  // Gives the parameter the rounding of the master.
  void write_back();

  const at::Tensor parameter_;
  const StalePolicy policy_;
  const std::shared_ptr<rref::SharedParameter> shared_;
  const bool has_master_;
  at::Tensor shadow_;
};

}  // namespace stitch::optim
