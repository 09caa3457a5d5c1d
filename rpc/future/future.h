#pragma once

#include <chrono>
#include <memory>
#include <type_traits>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/rpc/future/execution_context.h"
#include "stitch/rpc/future/future_state.h"

namespace stitch {

template <class T>
class Future;
template <class T>
class Promise;

namespace detail {

template <class T>
inline constexpr bool kIsFuture = false;
template <class T>
inline constexpr bool kIsFuture<Future<T>> = true;

// The T of Future<T>; T itself otherwise.
template <class T>
struct Unwrap {
  using type = T;
};
template <class T>
struct Unwrap<Future<T>> {
  using type = T;
};
template <class T>
using UnwrapT = typename Unwrap<T>::type;

// What then(fn) calls fn with: the value when it takes that, else the completed future.
template <class F, class T>
struct ThenResult {
  using type = std::invoke_result_t<F, Future<T>>;
};
template <class F, class T>
requires(!std::is_void_v<T> && std::is_invocable_v<F, T>) struct ThenResult<F, T> {
  using type = std::invoke_result_t<F, T>;
};
template <class F, class T>
requires(std::is_void_v<T>&& std::is_invocable_v<F>) struct ThenResult<F, T> {
  using type = std::invoke_result_t<F>;
};

template <class T>
class FutureAwaiter;
template <class T>
class CoroutinePromise;

inline constexpr const char* kReturnedEmptyFuture =
    "the function returned an empty future: a Future made by default, or one moved from";
// Throws Error(invalid_argument): `operation` needs a future, or a promise, that has a state.
[[noreturn]] void throw_empty_future(const char* operation);
[[noreturn]] void throw_empty_promise(const char* operation);

}  // namespace detail

// The outcome of work that may not be done yet: a value of type T (void allowed) or an error.
// Copies share the outcome. Dropping every copy does not stop the work; cancel() does.
// Thread contract: all methods from any thread. Continuations keep the worker, the deadline and the
// autograd context under which they were added (where none was current: the process's only worker)
// and run on that worker's thread pool, never under a lock; without any worker in the process, on
// the completing thread. get() and wait_for() must not be called from a STITCH_INLINE function.
template <class T>
class [[nodiscard]] Future {
 public:
  using value_type = T;  // what get() returns
  using promise_type =
      detail::CoroutinePromise<T>;  // a function returning Future<T> may be a coroutine

  // An empty future, without an outcome to come, as one that was moved from. Everything but
  // assigning and valid() throws Error(invalid_argument) naming the operation.
  Future() = default;
  // False for an empty future.
  [[nodiscard]] bool valid() const noexcept { return state_ != nullptr; }

  // Waits, then returns the value or throws: Error, or what a continuation or local promise threw.
  // May be called again; a value that cannot be copied is moved out by the first call.
  T get() const& {
    state("get()").wait();
    return take(false);
  }
  T get() && {
    state("get()").wait();
    return take(state_.use_count() == 1);
  }
  // True when it completed within `duration`.
  template <class Rep, class Period>
  [[nodiscard]] bool wait_for(std::chrono::duration<Rep, Period> duration) const {
    return state("wait_for()").wait_until(base::deadline_after(duration));
  }
  // True when it has completed, with a value or an error.
  [[nodiscard]] bool ready() const { return state("ready()").ready(); }
  // True when it completed with an error.
  [[nodiscard]] bool has_error() const {
    return state("has_error()").ready() && state_->exception() != nullptr;
  }
  // The error it completed with. Throws Error(invalid_argument) when there is none (yet).
  [[nodiscard]] Error error() const {
    static_cast<void>(state("error()"));
    if (!has_error())
      throw Error(ErrorCode::invalid_argument,
                  ready() ? "future has a value, not an error" : "future is not ready");
    return to_error(state_->exception());
  }
  // Completes the future with `cancelled`, for all that hold it, and asks its work to stop: a call
  // at its callee; a coroutine, a group or a then() by asking what it waits for, in turn. Nothing
  // happens when it is complete.
  void cancel() const { state("cancel()").cancel(); }

  // Calls `fn` with the value once there is one; an error skips `fn` and becomes that of the
  // returned future. A `fn` that takes a Future<T> is called in both cases. Returns the future of
  // fn's result (a returned Future is followed); what fn throws becomes its error. An `fn` that has
  // not begun when that future is cancelled is not called.
  template <class F>
  auto then(F&& fn) && {
    static_cast<void>(state("then()"));
    return continue_with(std::move(state_), std::forward<F>(fn));
  }
  template <class F>
  auto then(F&& fn) const& {
    static_cast<void>(state("then()"));
    return continue_with(state_, std::forward<F>(fn));
  }

  // Runs `callback` on the thread that completes the future, immediately when it is complete;
  // inside another such callback, after that one. For short work that must not wait for a pool
  // thread: it must neither block nor throw.
  void on_ready(base::UniqueFunction<void()> callback) const {
    state("on_ready()").on_ready(std::move(callback));
  }

  // For the layers below: its state. REQUIRES: valid().
  [[nodiscard]] const std::shared_ptr<detail::FutureState<T>>& shared_state() const noexcept {
    return state_;
  }
  // For the layers below: a future of an outcome that `state` will hold.
  explicit Future(std::shared_ptr<detail::FutureState<T>> state) : state_(std::move(state)) {}

  // co_await: suspends the coroutine until the future completes; it resumes as a continuation does.
  // A coroutine that is asked to stop (its own future is cancelled, its call has no caller any
  // more, its deadline has passed) has the work behind this future stop, once, and goes on when
  // that has ended: a call or a promise at once with `cancelled`, a coroutine when it returns.
  // shield() keeps a stop from a future.
  detail::FutureAwaiter<T> operator co_await() const& {
    static_cast<void>(state("co_await"));
    return detail::FutureAwaiter<T>(*this);
  }
  detail::FutureAwaiter<T> operator co_await() && {
    static_cast<void>(state("co_await"));
    return detail::FutureAwaiter<T>(std::move(*this));
  }

 private:
  template <class>
  friend class Future;
  friend class Promise<T>;
  friend class detail::FutureAwaiter<T>;
  template <class Fn>
  static constexpr bool kTakesFuture =
      std::is_void_v<T> ? !std::is_invocable_v<Fn&>
                        : !std::is_invocable_v<Fn&, typename detail::FutureState<T>::Stored>;

  // What `operation` works on.
  [[nodiscard]] detail::FutureState<T>& state(const char* operation) const {
    if (state_ == nullptr) [[unlikely]]
      detail::throw_empty_future(operation);
    return *state_;
  }
  T take(bool sole) const {
    if (state_->exception()) std::rethrow_exception(state_->exception());
    if constexpr (!std::is_void_v<T>) {
      state_->hand_over();
      if constexpr (detail::kCopyable<T>) {
        if (!sole) return state_->value();
      }
      return std::move(state_->value());
    }
  }

  template <class F>
  static auto continue_with(std::shared_ptr<detail::FutureState<T>> source, F&& fn) {
    using Fn = std::decay_t<F>;
    using Result = std::decay_t<typename detail::ThenResult<Fn&, T>::type>;  // a reference could
                                                                             // dangle by then
    Promise<detail::UnwrapT<Result>> promise;
    auto result = promise.future();
    result.state_->pass_stops_to(source);
    const auto state = source;
    rpc::Continuation continuation(rpc::ExecutionContext::captured(),
                                   [source = std::move(source), fn = Fn(std::forward<F>(fn)),
                                    promise = std::move(promise)]() mutable {
                                     if (promise.shared_state()->asked_to_stop()) {
                                       promise.set_exception(detail::cancelled());
                                       return;
                                     }
                                     Future done(std::move(source));
                                     promise.fulfil(
                                         [&]() -> Result { return call(fn, done); },
                                         done.state_->exception() != nullptr && !kTakesFuture<Fn>
                                             ? done.state_.get()
                                             : nullptr);
                                   });
    state->on_ready(
        [continuation = std::move(continuation)]() mutable { std::move(continuation).run(); });
    return result;
  }
  template <class Fn>
  static auto call(Fn& fn, Future& done) {
    if constexpr (kTakesFuture<Fn>) {
      return fn(std::move(done));
    } else if constexpr (std::is_void_v<T>) {
      return fn();
    } else {
      return fn(std::move(done).get());
    }
  }

  std::shared_ptr<detail::FutureState<T>> state_;
};

// The writing end of a Future. Copies share it; the first completion counts, later ones return
// false. When the last copy is destroyed without completing, the future completes with
// `cancelled` ("promise was dropped"). One that was moved from throws Error(invalid_argument).
// Thread contract: any thread; continuations of the future are started by the completing thread.
template <class T>
class Promise {
 public:
  Promise() : holder_(detail::make_state<Holder>()) {}

  // The future to complete; the same at each call.
  [[nodiscard]] Future<T> future() const { return Future<T>(holder("future()").state); }
  // The same, under the name that std::promise has for it.
  [[nodiscard]] Future<T> get_future() const { return future(); }
  // Completes the future with a value; false when it was complete.
  bool set_value() const requires std::is_void_v<T> {
    return holder("set_value()").state->set_value();
  }
  template <class U = T>
  requires(!std::is_void_v<T> && std::is_constructible_v<T, U>) bool set_value(U&& value) const {
    return holder("set_value()").state->set_value(std::forward<U>(value));
  }
  // Completes the future with an error; false when it was complete. A null `exception` is an error,
  // too: Error(invalid_argument).
  bool set_exception(std::exception_ptr exception) const {
    return holder("set_exception()").state->set_exception(std::move(exception));
  }
  // The same with a stitch::Error.
  bool set_error(Error error) const {
    return set_exception(std::make_exception_ptr(std::move(error)));
  }
  // What a stop of the future calls, once, before the future completes with `cancelled`: on the
  // thread that calls cancel(), or that stops a coroutine which awaits the future, a reader thread
  // or the event loop among them; at once if the future has been stopped. It must neither block nor
  // throw.
  template <class F>
  requires(std::is_invocable_v<std::decay_t<F>&>) void on_cancel(F&& canceller) const {
    base::UniqueFunction<void()> call =
        [canceller = std::decay_t<F>(std::forward<F>(canceller))]() mutable {
          static_cast<void>(canceller());
        };
    holder("on_cancel()").state->set_canceller([call = std::move(call)](detail::ToStop&) mutable {
      detail::call_back("Promise::on_cancel()", call);
      return false;
    });
  }
  // For the layers below: the state of the future.
  [[nodiscard]] const std::shared_ptr<detail::FutureState<T>>& shared_state() const {
    return holder("shared_state()").state;
  }
  // For the layers below: as FutureStateBase has it.
  void set_canceller(detail::Canceller canceller) const {
    holder("set_canceller()").state->set_canceller(std::move(canceller));
  }

  // Completes with the outcome of `make`, following a Future it returns; with the error of `failed`
  // when that is not null. `arrived`: the memory on devices that the value brings.
  template <class Make>
  void fulfil(Make&& make, detail::FutureStateBase* failed = nullptr,
              std::shared_ptr<const rpc::ArrivedMemory> arrived = nullptr) const {
    if (failed != nullptr) {
      set_exception(failed->exception());
      return;
    }
    using Result = std::invoke_result_t<Make>;
    try {
      if constexpr (detail::kIsFuture<Result>) {
        follow(make());
      } else if constexpr (std::is_void_v<Result>) {
        make();
        holder("fulfil()").state->set_value();
      } else {
        holder("fulfil()").state->set_value_with(std::move(arrived), make());
      }
    } catch (...) {
      set_exception(std::current_exception());
    }
  }

 private:
  struct Holder {
    std::shared_ptr<detail::FutureState<T>> state = detail::make_state<detail::FutureState<T>>();
    ~Holder() { state->drop_promise(); }
  };

  [[nodiscard]] const Holder& holder(const char* operation) const {
    if (holder_ == nullptr) [[unlikely]]
      detail::throw_empty_promise(operation);
    return *holder_;
  }

  void follow(const Future<T>& followed) const {
    if (!followed.valid()) throw Error(ErrorCode::invalid_argument, detail::kReturnedEmptyFuture);
    const auto state = followed.shared_state();
    holder_->state->pass_stops_to(state);
    state->on_ready([promise = *this, state] { promise.holder_->state->take_outcome(*state); });
  }

  std::shared_ptr<Holder> holder_;
};

// A future that is complete.
template <class T>
[[nodiscard]] Future<std::decay_t<T>> make_ready(T&& value) {
  Promise<std::decay_t<T>> promise;
  promise.set_value(std::forward<T>(value));
  return promise.future();
}
template <class T>
requires(!std::is_array_v<T>) [[nodiscard]] Future<T> make_ready(const T& value) {
  return make_ready(T(value));
}
template <class T = void>
requires std::is_void_v<T>
[[nodiscard]] Future<T> make_ready() {
  Promise<void> promise;
  promise.set_value();
  return promise.future();
}
// A future that has failed.
template <class T>
[[nodiscard]] Future<T> make_failed(Error error) {
  Promise<T> promise;
  promise.set_error(std::move(error));
  return promise.future();
}

}  // namespace stitch

#include "stitch/rpc/future/coroutine.h"     // IWYU pragma: export
#include "stitch/rpc/future/future_group.h"  // IWYU pragma: export
