#pragma once

#include <chrono>
#include <memory>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/rpc/future/future.h"

// How far a stop and a deadline reach.
namespace stitch {

namespace detail {
// The time that with_timeout() is given, for its error.
[[nodiscard]] Error waited_in_vain(std::chrono::nanoseconds time);
// Runtime::call_at() of the current worker, as long as this object lives. Throws as
// current_runtime().
class Timer {
 public:
  Timer(rpc::Clock::time_point when, base::UniqueFunction<void()> task);
  ~Timer() {
    if (stop_) stop_();
  }
  Timer(Timer&&) noexcept = default;
  Timer& operator=(Timer&&) = delete;

 private:
  base::UniqueFunction<void()> stop_;
};
// Has `state` completed with the outcome of `future`, as long as both the returned object and
// `state` exist.
template <class T>
[[nodiscard]] Watch follow(const Future<T>& future, const std::shared_ptr<FutureState<T>>& state) {
  const auto& source = future.shared_state();
  return Watch(source, [source, weak = std::weak_ptr(state)] {
    if (const auto waits = weak.lock()) waits->take_outcome(*source);
  });
}
}  // namespace detail

// The outcome of `future`, without its work: a stop of the returned future completes that with
// `cancelled`, and goes no further. co_await shield(future) is for work that others need, too.
template <class T>
[[nodiscard]] Future<T> shield(const Future<T>& future) {
  if (!future.valid()) detail::throw_empty_future("shield()");
  const auto state = detail::make_state<detail::FutureState<T>>();
  state->set_canceller([watch = detail::follow(future, state)](detail::ToStop&) { return false; });
  return Future<T>(state);
}

// The outcome of `future` if it comes within `time`; else an Error(timeout), and the work goes on.
// A stop of the returned future is one of `future`. Throws Error(invalid_argument) without a
// current worker, whose timer this needs.
template <class T, class Rep, class Period>
[[nodiscard]] Future<T> with_timeout(const Future<T>& future,
                                     std::chrono::duration<Rep, Period> time) {
  if (!future.valid()) detail::throw_empty_future("with_timeout()");
  const Promise<T> promise;
  const auto& state = promise.shared_state();
  const auto deadline = base::deadline_after(time);
  if (deadline == rpc::Clock::time_point::max()) return future;
  detail::Timer timer(deadline, [promise, time] {
    promise.set_error(
        detail::waited_in_vain(std::chrono::duration_cast<std::chrono::nanoseconds>(time)));
  });
  state->set_canceller(
      [watch = detail::follow(future, state), timer = std::move(timer)](detail::ToStop& more) {
        more.push_back(watch.state());
        return true;
      });
  return promise.future();
}

// Calls `fn` under the current worker, but without the deadline, the stop token and the autograd
// context of the code that calls this, and returns what it returns: for work that outlives its
// caller. Where that is a future, `fn` lives until the work has ended, also when that future is
// cancelled before, so it may be a coroutine with captures.
template <class F>
auto detached(F&& fn) {
  rpc::ExecutionContext context = rpc::ExecutionContext::current();
  context.deadline = rpc::Clock::time_point::max();
  context.stop = nullptr;
  context.autograd_context = nullptr;
  const rpc::ExecutionContextScope scope(std::move(context));
  using Fn = std::decay_t<F>;
  if constexpr (detail::kIsFuture<std::remove_cvref_t<std::invoke_result_t<Fn&>>>) {
    using Result = std::remove_cvref_t<std::invoke_result_t<Fn&>>;
    return [](Fn kept) -> Result { co_return co_await kept(); }(std::forward<F>(fn));
  } else {
    return std::forward<F>(fn)();
  }
}

}  // namespace stitch
