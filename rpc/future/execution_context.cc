#include "stitch/rpc/future/execution_context.h"

#include <ATen/core/grad_mode.h>

#include <optional>
#include <utility>
#include <vector>

#include "stitch/base/patience.h"
#include "stitch/rpc/future/autocast.h"
#include "stitch/rpc/future/current_streams.h"
#include "stitch/rpc/future/live_runtimes.h"

namespace stitch::rpc {

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

class ScopeMemory {
 public:
  explicit ScopeMemory(const ExecutionContext& context) {
    if (context.streams) outer_streams_.reserve(context.streams->streams().size());
  }
  void enter(const ExecutionContext& context) {
    if (context.streams) streams_.emplace(context.streams, std::move(outer_streams_));
    if (context.autocast) autocast_.emplace(*context.autocast);
  }
  void leave() noexcept {
    autocast_.reset();
    streams_.reset();
  }

 private:
  std::vector<c10::Stream> outer_streams_;
  std::optional<StreamSetScope> streams_;
  std::optional<AutocastScope> autocast_;
};

std::shared_ptr<ScopeMemory> ExecutionContextScope::memory_for(const ExecutionContext& context) {
  if (!context.streams && !context.autocast) return nullptr;
  return std::make_shared<ScopeMemory>(context);
}

void ExecutionContextScope::enter(std::shared_ptr<ScopeMemory> memory) {
  const ExecutionContext& context = ExecutionContext::current();
  memory_ = memory ? std::move(memory) : base::patiently([&] { return memory_for(context); });
  memory_->enter(context);
}

void ExecutionContextScope::leave() noexcept { memory_->leave(); }

bool turn_grad_off() noexcept {
  const bool was_on = at::GradMode::is_enabled();
  if (was_on) at::GradMode::set_enabled(false);
  return was_on;
}

void turn_grad_on() noexcept { at::GradMode::set_enabled(true); }

Continuation::Continuation(ExecutionContext context, base::UniqueFunction<void()> task)
    : work_(std::make_unique<Work>()) {
  work_->scope = ExecutionContextScope::memory_for(context);
  work_->context = std::move(context);
  work_->task = std::move(task);
}

void Continuation::run() && {
  const auto runtime =
      work_->context.runtime ? work_->context.runtime : LiveRuntimes::of_this_process().any();
  if (runtime) {
    runtime->post([work = std::move(work_)] { perform(*work); });
  } else {
    perform(*work_);
  }
}

void Continuation::perform(Work& work) {
  const ExecutionContextScope scope(std::move(work.context), std::move(work.scope));
  work.task();
}

void StopFlag::request() {
  if (auto source = raise()) source->request_stop();
}

std::optional<std::stop_source> StopFlag::raise() {
  base::MutexLock lock(mutex_);
  if (requested_.exchange(true, std::memory_order_acq_rel)) return std::nullopt;
  return source_;
}

std::stop_token StopFlag::token() {
  base::MutexLock lock(mutex_);
  if (!source_) {
    source_.emplace();
    if (requested()) source_->request_stop();  // it has no callbacks yet
    if (outer_) of_outer_.emplace(outer_->token(), PassOn{*source_});
  }
  return source_->get_token();
}

}  // namespace stitch::rpc

namespace stitch {

std::stop_token current_stop_token() {
  const auto& stop = rpc::ExecutionContext::current().stop;
  return stop ? stop->token() : std::stop_token{};
}

}  // namespace stitch
