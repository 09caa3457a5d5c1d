#include "stitch/dist_autograd/context.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <set>
#include <sstream>
#include <utility>

#include "stitch/dist_autograd/context_state.h"
#include "stitch/dist_autograd/current_context.h"
#include "stitch/dist_autograd/ended_context.h"
#include "stitch/dist_autograd/engine.h"
#include "stitch/dist_autograd/graph_dot.h"
#include "stitch/rpc/calls.h"

namespace stitch::dist_autograd {

namespace {

// Makes `state` current on this thread; returns what was current before.
std::shared_ptr<const void> make_current(std::shared_ptr<ContextState> state) {
  return std::exchange(rpc::ExecutionContext::current().autograd_context,
                       std::make_shared<const CurrentContext>(
                           CurrentContext{std::move(state), {}, CurrentContext::get()}));
}

// What becomes current again at the end of a block: skips contexts that have ended in the meantime.
std::shared_ptr<const void> not_ended(const std::shared_ptr<const void>& outer) {
  auto current = std::static_pointer_cast<const CurrentContext>(outer);
  while (current && current->context->ended()) current = current->outer;
  return current;
}

std::shared_ptr<ContextState> find_state(rpc::Agent& agent, const ContextId& id) {
  auto& contexts = Engine::of(agent).contexts();
  auto state = contexts.find(id);
  if (state) return state;
  if (contexts.has_ended(id)) throw ended_error(id);
  throw Error(ErrorCode::invalid_argument,
              "context " + to_string(id) + " is unknown to " + stitch::to_string(agent.self()));
}

// Differentiable where the gradient is.
at::Tensor copy_of(const at::Tensor& gradient) {
  if (!gradient.defined()) return {};
  const at::AutoGradMode mode(gradient.requires_grad());
  const c10::InferenceMode off(false);
  return gradient.clone();
}

void scale_here(const ContextState& context, double factor) {
  context.throw_if_unusable();
  context.gradients()->change_all([factor](const at::Tensor& gradient) {
    const at::AutoGradMode mode(gradient.requires_grad());
    const c10::InferenceMode off(false);
    return gradient * factor;
  });
}

std::vector<WorkerId> told_by(const ContextState& context) {
  std::vector<WorkerId> told;
  for (const WorkerInfo& peer : context.peers()) told.push_back(peer.id);
  return told;
}

std::shared_ptr<rpc::Agent> usable_agent() {
  auto agent = rpc::current_agent();
  agent->throw_if_stopped();
  return agent;
}

}  // namespace

namespace detail {

// Called on each worker of the context; returns the workers that it has told of it.
std::vector<WorkerId> scale_gradients_here(ContextId id, double factor) {
  const auto context = Engine::of(*rpc::current_agent()).contexts().find(id);
  if (!context) return {};
  scale_here(*context, factor);
  return told_by(*context);
}

}  // namespace detail

const ContextId& ContextHandle::id() const noexcept { return state_->id(); }

void ContextHandle::backward(std::vector<at::Tensor> roots, const Options& options) const {
  backward(std::move(roots), options, nullptr);
}

void ContextHandle::backward(std::vector<at::Tensor> roots, const Options& options,
                             std::shared_ptr<AtSettled> at_settled) const {
  agent_->throw_if_stopped();
  Engine::of(*agent_).backward(state_, std::move(roots), options, std::move(at_settled));
}

Future<void> ContextHandle::backward_async(std::vector<at::Tensor> roots,
                                           const Options& options) const {
  return backward_async(std::move(roots), options, nullptr);
}

Future<void> ContextHandle::backward_async(std::vector<at::Tensor> roots, const Options& options,
                                           std::shared_ptr<AtSettled> at_settled) const {
  agent_->throw_if_stopped();
  return Engine::of(*agent_).backward_async(state_, std::move(roots), options,
                                            std::move(at_settled));
}

// Read first, checked afterwards: if the context is usable now, the gradients were complete then.
GradientMap ContextHandle::gradients() const {
  GradientMap all = state_->gradients()->snapshot();
  state_->throw_if_unusable();
  for (auto& [leaf, gradient] : all) gradient = copy_of(gradient);
  return all;
}

at::Tensor ContextHandle::gradient(const at::Tensor& leaf) const {
  return copy_of(stored_gradient(leaf));
}

at::Tensor ContextHandle::stored_gradient(const at::Tensor& leaf) const {
  at::Tensor gradient = state_->gradients()->find(leaf);
  state_->throw_if_unusable();
  return gradient;
}

// In waves: the workers that this one has told, those that they have told, and so on.
void ContextHandle::scale_gradients(double factor) const {
  agent_->throw_if_stopped();
  state_->throw_if_unusable();
  rpc::ExecutionContext plain = rpc::ExecutionContext::current();
  plain.runtime = agent_;
  plain.autograd_context = nullptr;  // the request itself must not be recorded
  const rpc::ExecutionContextScope scope(std::move(plain));
  std::set<WorkerId> reached{agent_->self().id};
  std::vector<WorkerId> next = told_by(*state_);
  next.push_back(id().home);
  try {
    scale_here(*state_, factor);
    while (!next.empty()) {
      std::vector<Future<std::vector<WorkerId>>> wave;
      for (const WorkerId worker : std::exchange(next, {})) {
        if (reached.insert(worker).second)
          wave.push_back(rpc_async<detail::scale_gradients_here>(worker, id(), factor));
      }
      for (const auto& told : when_all(std::move(wave)).get())
        next.insert(next.end(), told.begin(), told.end());
    }
  } catch (...) {
    fail(to_error(std::current_exception()));
    throw;
  }
}

std::uint64_t ContextHandle::steps_before() const noexcept { return state_->steps_before(); }

void ContextHandle::fail(const Error& error) const {
  const PassId pass{agent_->self().id, agent_->self().epoch, state_->next_pass()};
  Engine::of(*agent_).fail_context(*state_, {.context = id(), .pass = pass}, error, {});
  state_->close_pass(pass);
}

void ContextHandle::set_gradient(const at::Tensor& leaf, const at::Tensor& gradient) const {
  if (!leaf.defined() || !leaf.is_leaf())
    throw Error(ErrorCode::invalid_argument, "a gradient can be set of a leaf tensor only");
  if (gradient.defined() &&
      (gradient.sizes() != leaf.sizes() || gradient.scalar_type() != leaf.scalar_type() ||
       gradient.device() != leaf.device())) {
    std::ostringstream text;
    text << "gradient of type " << gradient.scalar_type() << ' ' << gradient.sizes() << " on "
         << gradient.device() << " is not of its leaf, of type " << leaf.scalar_type() << ' '
         << leaf.sizes() << " on " << leaf.device();
    throw Error(ErrorCode::invalid_argument, text.str());
  }
  change_gradient(leaf, [&](const at::Tensor&) { return copy_of(gradient); });
}

void ContextHandle::change_gradient(const at::Tensor& leaf,
                                    const std::function<at::Tensor(const at::Tensor&)>& how) const {
  state_->throw_if_unusable();
  state_->gradients()->change(leaf, how);
}

void ContextHandle::throw_if_unusable() const { state_->throw_if_unusable(); }

std::string ContextHandle::graph_dot(const std::vector<at::Tensor>& roots) const {
  if (state_->ended()) throw ended_error(state_->id());
  return collect_graph(agent_, *state_, roots);
}

Context::Context() : Context(usable_agent()) {}

Context::Context(std::shared_ptr<rpc::Agent> agent)
    : ContextHandle(agent, Engine::of(*agent).contexts().create()) {
  outer_ = make_current(state_);
}

Context::~Context() {
  auto& slot = rpc::ExecutionContext::current().autograd_context;
  if (slot && CurrentContext::get()->context == state_) slot = not_ended(outer_);
  Engine::of(*agent_).end_context(state_);
}

ContextScope::ContextScope(const ContextId& id) {
  outer_ = make_current(find_state(*rpc::current_agent(), id));
}

ContextScope::~ContextScope() {
  rpc::ExecutionContext::current().autograd_context = not_ended(outer_);
}

bool has_current_context() noexcept {
  const auto current = CurrentContext::get();
  return current && !current->context->ended();
}

ContextHandle current_context() {
  const auto current = CurrentContext::get();
  if (!current) {
    throw Error(ErrorCode::invalid_argument,
                "no dist_autograd context is current on this thread: make a "
                "dist_autograd::Context, or a context_scope(id) on a thread of "
                "your own");
  }
  if (current->context->ended()) throw ended_error(current->context->id());
  return {rpc::current_agent(), current->context};
}

ContextHandle find_context(const ContextId& id) {
  auto agent = rpc::current_agent();
  auto state = find_state(*agent, id);
  return {std::move(agent), std::move(state)};
}

std::optional<ContextHandle> find_usable_context(const ContextId& id) {
  auto agent = rpc::current_agent();
  auto& contexts = Engine::of(*agent).contexts();
  auto state = contexts.find(id);
  if (!state) {
    if (contexts.has_ended(id)) throw ended_error(id);
    return std::nullopt;
  }
  state->throw_if_unusable();
  return ContextHandle(std::move(agent), std::move(state));
}

Future<void> backward_async(const ContextId& context, std::vector<at::Tensor> roots,
                            const Options& options) {
  return find_context(context).backward_async(std::move(roots), options);
}

}  // namespace stitch::dist_autograd
