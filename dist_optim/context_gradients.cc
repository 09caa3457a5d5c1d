#include "stitch/dist_optim/context_gradients.h"

#include "stitch/dist_autograd/engine.h"
#include "stitch/rpc/calls.h"

namespace stitch::optim {

ContextGradients::ContextGradients(const dist_autograd::ContextId& context) {
  const auto agent = current_agent();
  if (auto state = dist_autograd::Engine::of(*agent).contexts().find(context))
    context_.emplace(agent, std::move(state));
}

at::Tensor ContextGradients::find(const at::Tensor& parameter) const {
  return context_ ? context_->gradient(parameter) : at::Tensor();
}

}  // namespace stitch::optim
