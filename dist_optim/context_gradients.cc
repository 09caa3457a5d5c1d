#include "stitch/dist_optim/context_gradients.h"

namespace stitch::optim {

ContextGradients::ContextGradients(const dist_autograd::ContextId& context)
    : context_(dist_autograd::find_usable_context(context)) {}

at::Tensor ContextGradients::find(const at::Tensor& parameter) const {
  return context_ ? context_->gradient(parameter) : at::Tensor();
}

}  // namespace stitch::optim
