#pragma once

#include <coroutine>
#include <exception>
#include <utility>

#include "stitch/rpc/future.h"

// What makes Future<T> awaitable and a coroutine return type. Included by future.h.
namespace stitch::detail {

template <class T>
class FutureAwaiter {
 public:
  explicit FutureAwaiter(Future<T> future) : future_(std::move(future)) {}
  [[nodiscard]] bool await_ready() const noexcept { return future_.ready(); }
  template <class P>
  void await_suspend(std::coroutine_handle<P> coroutine) {
    Ambient inside = Ambient::captured();
    // The coroutine's scopes (a WorkerScope, a Context) stay with the coroutine; its caller gets
    // back what it had. This comes first: once the callback is registered, another thread may
    // finish the coroutine and free everything here.
    if constexpr (requires { coroutine.promise().outside(); })
      Ambient::current() = coroutine.promise().outside();
    future_.on_ready([inside = std::move(inside), coroutine]() mutable {
      run_continuation(std::move(inside), [coroutine] { coroutine.resume(); });
    });
  }
  T await_resume() { return std::move(future_).get(); }

 private:
  Future<T> future_;
};

template <class T>
class CoroutinePromiseBase {
 public:
  CoroutinePromiseBase() : outside_(Ambient::current()) {}
  Future<T> get_return_object() { return promise_.future(); }
  std::suspend_never initial_suspend() noexcept { return {}; }
  std::suspend_never final_suspend() noexcept { return {}; }
  void unhandled_exception() { promise_.set_exception(std::current_exception()); }
  // What was current where the coroutine was started.
  [[nodiscard]] const Ambient& outside() const noexcept { return outside_; }

 protected:
  Promise<T> promise_;

 private:
  Ambient outside_;
};

template <class T>
class CoroutinePromise : public CoroutinePromiseBase<T> {
 public:
  template <class U = T>
  requires std::is_constructible_v<T, U>
  void return_value(U&& value) { this->promise_.set_value(std::forward<U>(value)); }
};

template <>
class CoroutinePromise<void> : public CoroutinePromiseBase<void> {
 public:
  void return_void() { promise_.set_value(); }
};

}  // namespace stitch::detail
