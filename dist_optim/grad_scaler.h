#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "stitch/dist_autograd/graph/ids.h"

namespace stitch::optim {

// Of a GradScaler.
struct GradScalerOptions {
  double scale = 65536;          // the first factor
  double growth = 2;             // the factor is multiplied by this after `interval` good steps
  double backoff = 0.5;          // and by this after a step with inf or NaN
  std::int64_t interval = 2000;  // steps
};

// torch.amp.GradScaler over all owners: the loss is multiplied by a factor, so that gradients in
// half precision do not vanish, and a step that is given the scaler divides them again. Where any
// owner has inf or NaN the step is skipped on all of them, and the factor shrinks; after `interval`
// good steps it grows. Copies are the same scaler. Thread contract: any thread.
class GradScaler {
 public:
  // Throws Error(invalid_argument) for options out of their range.
  explicit GradScaler(const GradScalerOptions& options = {});

  // The loss times the factor, for backward(). A context keeps the factor that it was first given,
  // so that its step divides by that, even if steps of others change the factor meanwhile.
  [[nodiscard]] at::Tensor scale(const at::Tensor& loss) const;
  // The factor of contexts to come.
  [[nodiscard]] double scale_factor() const;

  // What a checkpoint keeps of it.
  struct State {
    double scale = 0;             // the factor
    std::int64_t good_steps = 0;  // since it last changed
  };
  // As it is now.
  [[nodiscard]] State state() const;
  // As it was. Throws Error(invalid_argument) for a factor that is not positive and finite.
  void set_state(const State& state) const;

  // For steps: the factor of a context.
  [[nodiscard]] double factor_of(const dist_autograd::ContextId& context) const;
  // Likewise: a step has found its gradients finite, or not.
  void update(bool finite) const;

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace stitch::optim
