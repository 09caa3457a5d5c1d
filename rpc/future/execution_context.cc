#include "stitch/rpc/future/execution_context.h"

#include <ATen/core/grad_mode.h>

#include <optional>
#include <utility>

#include "stitch/rpc/future/autocast.h"
#include "stitch/rpc/future/current_streams.h"
#include "stitch/rpc/future/live_runtimes.h"

namespace stitch::rpc {

void StopFlag::request(const std::shared_ptr<Runtime>& runtime, detail::ToStop& more,
                       bool with_work) {
  std::optional<std::stop_source> source;
  std::shared_ptr<detail::FutureStateBase> awaited;
  {
    base::MutexLock lock(mutex_);
    if (!requested_.exchange(true, std::memory_order_acq_rel)) source = source_;
    if (with_work) {
      to_pass_on_ = true;
      awaited = awaited_.lock();
    }
  }
  if (source && runtime) {
    runtime->run_stop([source = std::move(*source), awaited = std::move(awaited)]() mutable {
      source.request_stop();
      detail::FutureStateBase::stop({awaited});
    });
    return;
  }
  if (source) source->request_stop();
  more.push_back(std::move(awaited));
}

std::stop_token StopFlag::token() {
  base::MutexLock lock(mutex_);
  if (!source_) {
    source_.emplace();
    if (requested()) source_->request_stop();  // it has no callbacks yet
  }
  return source_->get_token();
}

bool StopFlag::awaits(const std::shared_ptr<detail::FutureStateBase>& state) {
  base::MutexLock lock(mutex_);
  awaited_ = state;
  return to_pass_on_;
}

void StopFlag::resumed(bool with_error) {
  base::MutexLock lock(mutex_);
  awaited_.reset();
  if (with_error) to_pass_on_ = false;
}

ExecutionContext& ExecutionContext::current() noexcept {
  thread_local ExecutionContext context;
  return context;
}

ExecutionContext ExecutionContext::captured() {
  ExecutionContext context = current();
  if (!context.runtime) context.runtime = LiveRuntimes::of_this_process().sole();
  if (devices_in_use.load(std::memory_order_relaxed) != 0) [[unlikely]]
    context.streams = StreamSet::current();
  return context;
}

namespace {
struct TorchState {
  explicit TorchState(const ExecutionContext& context) : streams(context.streams) {
    if (context.autocast) autocast.emplace(*context.autocast);
  }
  StreamSetScope streams;
  std::optional<AutocastScope> autocast;
};
}  // namespace

void ExecutionContextScope::enter() {
  torch_state_ = std::make_shared<const TorchState>(ExecutionContext::current());
}

bool turn_grad_off() noexcept {
  const bool was_on = at::GradMode::is_enabled();
  if (was_on) at::GradMode::set_enabled(false);
  return was_on;
}

void turn_grad_on() noexcept { at::GradMode::set_enabled(true); }

void Continuation::run() && {
  const auto runtime =
      work_->context.runtime ? work_->context.runtime : LiveRuntimes::of_this_process().any();
  if (runtime) {
    runtime->post([work = std::move(work_)] { run_work(*work); });
  } else {
    run_work(*work_);
  }
}

void Continuation::run_work(Work& work) {
  const ExecutionContextScope scope(std::move(work.context));
  work.task();
}

}  // namespace stitch::rpc

namespace stitch {

std::stop_token current_stop_token() {
  const auto& stop = rpc::ExecutionContext::current().stop;
  return stop ? stop->token() : std::stop_token{};
}

}  // namespace stitch
