#pragma once

#include <coroutine>
#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "stitch/base/recycler.h"
#include "stitch/rpc/future/future.h"

// What makes Future<T> awaitable and a coroutine return type. Included by future.h.
namespace stitch::detail {

template <class T>
class FutureAwaiter {
 public:
  explicit FutureAwaiter(Future<T> future) : future_(std::move(future)) {}
  [[nodiscard]] bool await_ready() const noexcept { return future_.ready(); }
  // Not inlined: its locals must not be in the frame, which may be gone before it returns.
  template <class P>
  [[gnu::noinline]] void await_suspend(std::coroutine_handle<P> coroutine) {
    const std::shared_ptr<FutureStateBase> state = future_.shared_state();
    rpc::ExecutionContext inside = rpc::ExecutionContext::captured();
    bool stops = false;
    if constexpr (requires { coroutine.promise().stop_flag(inside); }) {
      inside.stop = stop_ = coroutine.promise().stop_flag(inside);
      stops = stop_->awaits(state);
    }
    rpc::Continuation rest(std::move(inside), [coroutine] { coroutine.resume(); });
    // The coroutine's scopes (a WorkerScope, a Context) stay with the coroutine; its caller gets
    // back what it had. This comes first: once the callback is registered, another thread may
    // finish the coroutine and free everything here.
    if constexpr (requires { coroutine.promise().outside(); })
      rpc::ExecutionContext::current() = coroutine.promise().outside();
    state->on_ready([rest = std::move(rest)]() mutable { std::move(rest).run(); });
    if (stops) FutureStateBase::stop({state});
  }
  T await_resume() {
    if (stop_) stop_->resumed(future_.has_error());
    return std::move(future_).get();
  }

 private:
  Future<T> future_;
  std::shared_ptr<rpc::StopFlag> stop_;  // the coroutine's; null if there was nothing to wait for
};

// Where a coroutine ends: publishes its outcome after its frame, parameters included, is destroyed.
// So code that waits for the outcome may destroy what the coroutine worked on.
struct PublishOutcome {
  [[nodiscard]] static constexpr bool await_ready() noexcept { return false; }
  template <class P>
  static void await_suspend(std::coroutine_handle<P> coroutine) noexcept {
    P::finish(coroutine);
  }
  static constexpr void await_resume() noexcept {}
};

template <class T>
class CoroutinePromiseBase {
 public:
  CoroutinePromiseBase() : outside_(rpc::ExecutionContext::current()) {}
  Future<T> get_return_object() { return promise_.future(); }
  std::suspend_never initial_suspend() noexcept { return {}; }
  PublishOutcome final_suspend() noexcept { return {}; }
  void unhandled_exception() { thrown_ = std::current_exception(); }
  // For its code, and what that starts, from the first wait on: set when its future is stopped.
  [[nodiscard]] const std::shared_ptr<rpc::StopFlag>& stop_flag(
      const rpc::ExecutionContext& inside) {
    if (!stop_) {
      stop_ = std::allocate_shared<rpc::StopFlag>(base::RecyclingAllocator<rpc::StopFlag>(),
                                                  inside.stop.get());
      promise_.set_canceller([stop = stop_, runtime = std::weak_ptr(inside.runtime)](ToStop& more) {
        stop->request(runtime.lock(), more);
        return true;
      });
    }
    return stop_;
  }
  static void* operator new(std::size_t bytes) { return base::take_recycled(bytes); }
  static void operator delete(void* frame, std::size_t bytes) noexcept {
    base::recycle(frame, bytes);
  }
  // What was current where the coroutine was started.
  [[nodiscard]] const rpc::ExecutionContext& outside() const noexcept { return outside_; }

 protected:
  Promise<T> promise_;
  std::exception_ptr thrown_;

 private:
  rpc::ExecutionContext outside_;
  std::shared_ptr<rpc::StopFlag> stop_;  // once it has awaited something
};

template <class T>
class CoroutinePromise : public CoroutinePromiseBase<T> {
 public:
  template <class U = T>
  requires std::is_constructible_v<T, U>
  void return_value(U&& value) { value_.emplace(std::forward<U>(value)); }

  // Not inlined: its locals must not be in the frame that it destroys.
  [[gnu::noinline]] static void finish(std::coroutine_handle<CoroutinePromise> coroutine) noexcept {
    CoroutinePromise& ended = coroutine.promise();
    const Promise<T> promise = std::move(ended.promise_);
    std::exception_ptr thrown = std::move(ended.thrown_);
    std::optional<T> value = ended.take_value(thrown);
    coroutine.destroy();
    if (thrown) {
      promise.set_exception(std::move(thrown));
    } else {
      promise.set_value(std::move(*value));
    }
  }

 private:
  [[nodiscard]] std::optional<T> take_value(std::exception_ptr& thrown) noexcept {
    if (thrown) return std::nullopt;
    try {
      return std::optional<T>(std::move(value_));
    } catch (...) {
      thrown = std::current_exception();
      return std::nullopt;
    }
  }
  std::optional<T> value_;
};

template <>
class CoroutinePromise<void> : public CoroutinePromiseBase<void> {
 public:
  void return_void() noexcept {}

  [[gnu::noinline]] static void finish(std::coroutine_handle<CoroutinePromise> coroutine) noexcept {
    const Promise<void> promise = std::move(coroutine.promise().promise_);
    std::exception_ptr thrown = std::move(coroutine.promise().thrown_);
    coroutine.destroy();
    if (thrown) {
      promise.set_exception(std::move(thrown));
    } else {
      promise.set_value();
    }
  }
};

}  // namespace stitch::detail
