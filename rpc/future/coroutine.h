#pragma once

#include <coroutine>
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
  template <class P>
  void await_suspend(std::coroutine_handle<P> coroutine) {
    rpc::ExecutionContext inside = rpc::ExecutionContext::captured();
    if constexpr (requires { coroutine.promise().await(future_, inside); })
      outcome_ = coroutine.promise().await(future_, inside);
    // With all the memory that it needs: from here on nothing can fail.
    auto resume =
        FutureStateBase::one_callback([rest = rpc::Continuation(std::move(inside), [coroutine] {
                                         coroutine.resume();
                                       })]() mutable { std::move(rest).run(); });
    std::shared_ptr<FutureStateBase> to_stop;
    if (outcome_) {
      const auto weak = future_.outcome();
      const bool go_on =
          outcome_->set_awaited([weak, own = std::weak_ptr<FutureStateBase>(outcome_)] {
            if (const auto awaited = weak.lock(); awaited && !awaited->ready()) {
              awaited->stop_work();
            } else if (const auto coroutine_state = own.lock()) {
              // That has ended, and the coroutine is about to go on: what it awaits next stops.
              static_cast<void>(coroutine_state->stop_coroutine());
            }
          });
      if (!go_on) to_stop = weak.lock();
    }
    // The coroutine's scopes (a WorkerScope, a Context) stay with the coroutine; its caller gets
    // back what it had. This comes first: once the callback is registered, another thread may
    // finish the coroutine and free everything here.
    if constexpr (requires { coroutine.promise().outside(); })
      rpc::ExecutionContext::current() = coroutine.promise().outside();
    try {
      future_.state_->on_ready(std::move(resume));
    } catch (...) {
      // Thrown by a callback, which must not throw; the coroutine may have ended meanwhile.
    }
    if (to_stop) to_stop->stop_work();  // nothing here is touched any more
  }
  T await_resume() {
    if (outcome_) outcome_->clear_awaited();
    return std::move(future_).get();
  }

 private:
  Future<T> future_;
  std::shared_ptr<FutureStateBase> outcome_;  // of the coroutine that awaits it
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
  // The outcome of this coroutine, which is about to await something for the first time or again;
  // `inside` is what is current in it afterwards. Its code has a stop token of its own from then
  // on, which asks it to stop when its future is cancelled, or when its caller is asked to.
  template <class Awaited>
  [[nodiscard]] std::shared_ptr<FutureStateBase> await(const Future<Awaited>&,
                                                       rpc::ExecutionContext& inside) {
    auto outcome = promise_.future().outcome().lock();
    if (!stop_) {
      stop_ = std::allocate_shared<rpc::StopFlag>(base::RecyclingAllocator<rpc::StopFlag>(),
                                                  inside.stop);
      outcome->set_coroutine(stop_);
    }
    inside.stop = stop_;
    return outcome;
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
    try {
      if (thrown) {
        promise.set_exception(std::move(thrown));
      } else {
        promise.set_value(std::move(*value));
      }
    } catch (...) {
      // Thrown by a callback, which must not throw: the outcome is published all the same.
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
    try {
      if (thrown) {
        promise.set_exception(std::move(thrown));
      } else {
        promise.set_value();
      }
    } catch (...) {
      // Thrown by a callback, which must not throw: the outcome is published all the same.
    }
  }
};

}  // namespace stitch::detail
