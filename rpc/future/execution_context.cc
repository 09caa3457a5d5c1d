#include "stitch/rpc/future/execution_context.h"

#include <ATen/core/grad_mode.h>

#include <new>
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

namespace {

// The request_stop() that runs on this thread, the innermost one.
struct StopRequest {
  int nested = 0;  // sources inside one another whose callbacks run
  std::vector<std::stop_source> later{};
};
thread_local StopRequest* stop_request_here = nullptr;

}  // namespace

void StopFlag::request_stop(std::stop_source source) {
  StopRequest request;
  auto* const outer = std::exchange(stop_request_here, &request);
  source.request_stop();
  for (std::size_t i = 0; i < request.later.size(); ++i) {  // more are added meanwhile
    source = std::move(request.later[i]);
    source.request_stop();
  }
  stop_request_here = outer;
}

void StopFlag::PassOn::operator()() {
  std::stop_source inside = std::move(to);  // this object may be destroyed by a callback in there
  StopRequest* const request = stop_request_here;
  if (request == nullptr) {
    StopFlag::request_stop(std::move(inside));
    return;
  }
  if (request->nested == kMaxNestedStops) {
    try {
      request->later.push_back(inside);
      return;
    } catch (const std::bad_alloc&) {
      // Here, then.
    }
    inside.request_stop();
    return;
  }
  ++request->nested;
  inside.request_stop();
  --request->nested;
}

void StopFlag::request() {
  if (auto source = raise()) request_stop(std::move(*source));
}

std::optional<std::stop_source> StopFlag::raise() {
  base::MutexLock lock(mutex_);
  if (requested_.exchange(true, std::memory_order_acq_rel)) return std::nullopt;
  return source_;
}

void StopFlag::request_apart() {
  auto source = raise();
  if (!source) return;
  if (const auto runtime = runtime_.lock()) {
    runtime->run_stop(std::move(*source));
  } else {
    request_stop(std::move(*source));
  }
}

std::optional<std::stop_token> StopFlag::made_token() {
  base::MutexLock lock(mutex_);
  return source_ ? std::optional(source_->get_token()) : std::nullopt;
}

// The code of a coroutine may have the tokens of those around it, as arguments. Those further out
// show theirs as they go on: each of many that are nested would go through all of them.
void StopFlag::show() {
  int left = kMaxNestedStops;
  for (StopFlag* flag = this; flag != nullptr && left-- > 0; flag = flag->outer_.get()) {
    if (!flag->requested_.load(std::memory_order_acquire)) continue;
    std::optional<std::stop_source> source;
    {
      base::MutexLock lock(flag->mutex_);
      source = flag->source_;
    }
    if (source) request_stop(std::move(*source));
  }
}

void StopFlag::make_token(bool requested) {
  std::optional<std::stop_token> outer;
  if (outer_) outer = outer_->made_token();
  base::MutexLock lock(mutex_);
  if (source_) return;
  source_.emplace();
  // It has no callbacks yet.
  if (requested || requested_.load(std::memory_order_acquire)) source_->request_stop();
  if (!outer) return;
  of_outer_.emplace(*outer, PassOn{*source_});
  if (outer->stop_requested()) source_->request_stop();  // it may have been left for later
}

// From the outermost that has none inwards: coroutines may be nested as deeply as memory allows.
std::stop_token StopFlag::token() {
  std::vector<StopFlag*> without;
  for (StopFlag* flag = this; flag != nullptr && !flag->made_token(); flag = flag->outer_.get())
    without.push_back(flag);
  bool requested = !without.empty() && without.back()->requested();
  for (auto flag = without.rbegin(); flag != without.rend(); ++flag) {
    requested = requested || (*flag)->requested_.load(std::memory_order_acquire);
    (*flag)->make_token(requested);
  }
  return *made_token();
}

}  // namespace stitch::rpc

namespace stitch {

std::stop_token current_stop_token() {
  const auto& stop = rpc::ExecutionContext::current().stop;
  return stop ? stop->token() : std::stop_token{};
}

}  // namespace stitch
