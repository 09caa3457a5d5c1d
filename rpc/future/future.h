#pragma once

// One file, though long: a future and its promise, each of which makes the other.

#include <chrono>
#include <concepts>
#include <memory>
#include <optional>
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

// The state of a Future, which counts the Futures that have it (FutureStateBase::add_hold()).
template <class T>
class HeldState {
 public:
  HeldState() = default;
  explicit HeldState(std::shared_ptr<FutureState<T>> state) noexcept : state_(std::move(state)) {
    if (state_) state_->add_hold();
  }
  HeldState(const HeldState& other) noexcept : HeldState(other.state_) {}
  HeldState(HeldState&& other) noexcept = default;  // leaves `other` empty
  HeldState& operator=(HeldState other) noexcept {
    state_.swap(other.state_);
    return *this;
  }
  ~HeldState() {
    if (state_) state_->drop_hold();
  }
  [[nodiscard]] const std::shared_ptr<FutureState<T>>& shared() const noexcept { return state_; }
  [[nodiscard]] FutureState<T>* get() const noexcept { return state_.get(); }
  FutureState<T>* operator->() const noexcept { return state_.get(); }

 private:
  std::shared_ptr<FutureState<T>> state_;
};

}  // namespace detail

// The outcome of work that may not be done yet: a value of type T (void allowed) or an error.
// Copies share the outcome. Dropping every copy does not stop the work; cancel() asks for that, and
// so does a coroutine that is asked to stop while it awaits the outcome, if nothing else holds it.
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
  [[nodiscard]] bool valid() const noexcept { return state_.get() != nullptr; }

  // Waits, then returns the value or throws: Error, or what a continuation or local promise threw.
  // May be called again; a value that cannot be copied is moved out by the first call.
  T get() const& {
    state("get()").wait();
    return take(false);
  }
  T get() && {
    state("get()").wait();
    return take(state_.shared().use_count() == 1);
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
  // Gives up on the outcome, for all that hold it: the future completes with `cancelled` and the
  // work is asked to stop. Nothing happens when it is complete.
  void cancel() const { state("cancel()").cancel(); }

  // Calls `fn` with the value once there is one; an error skips `fn` and becomes that of the
  // returned future. A `fn` that takes a Future<T> is called in both cases. Returns the future of
  // fn's result (a returned Future is followed); what fn throws becomes its error.
  template <class F>
  auto then(F&& fn) && {
    const Future held = std::move(*this);  // not until the end of the caller's expression
    return held.then(std::forward<F>(fn));
  }
  template <class F>
  auto then(F&& fn) const& {
    static_cast<void>(state("then()"));
    using Fn = std::decay_t<F>;
    using Result = std::decay_t<typename detail::ThenResult<Fn&, T>::type>;  // a reference could
                                                                             // dangle by then
    Promise<detail::UnwrapT<Result>> promise;
    auto result = promise.future();
    auto interest = detail::make_interest(state_.shared());
    result.state_->set_canceller(
        [weak = std::weak_ptr<detail::Interest>(interest)](detail::Cancel how) {
          const auto interest = weak.lock();
          return !interest || interest->cancel(how);  // none: `fn` runs
        });
    rpc::Continuation continuation(
        rpc::ExecutionContext::captured(),
        [interest, fn = Fn(std::forward<F>(fn)), promise = std::move(promise)]() mutable {
          const auto begin = interest->begin();
          if (begin == detail::Interest::Begin::no) return;
          auto source = std::static_pointer_cast<detail::FutureState<T>>(interest->state());
          interest.reset();
          Future done(std::move(source));
          if (begin == detail::Interest::Begin::stopped) {
            promise.set_exception(detail::given_up_work());
            return;
          }
          promise.fulfil([&]() -> Result { return call(fn, done); },
                         done.state_->exception() != nullptr && !kTakesFuture<Fn>
                             ? done.state_.get()
                             : nullptr);
        });
    interest->watch(detail::FutureStateBase::one_callback(
        [continuation = std::move(continuation)]() mutable { std::move(continuation).run(); }));
    return result;
  }

  // Runs `callback` on the thread that completes the future, immediately when it is complete;
  // inside another such callback, after that one. For short work that must not wait for a pool
  // thread: it must neither block nor throw.
  void on_ready(base::UniqueFunction<void()> callback) const {
    state("on_ready()").on_ready(std::move(callback));
  }

  // For the layers below: its state, which a copy of this pointer does not hold. REQUIRES: valid().
  [[nodiscard]] const std::shared_ptr<detail::FutureState<T>>& shared_state() const noexcept {
    return state_.shared();
  }
  // For the layers below: a future of an outcome that `state` will hold.
  explicit Future(std::shared_ptr<detail::FutureState<T>> state) : state_(std::move(state)) {}

  // co_await: suspends the coroutine until the future completes; it resumes as a continuation does.
  // A coroutine that is asked to stop meanwhile (its own future is cancelled, its caller gives up)
  // asks the work behind the future to stop and goes on with its outcome. Where others hold the
  // future, too, or nothing is known that could stop its work (a promise without on_cancel()), the
  // work goes on and co_await throws `cancelled`; the last one to drop the future stops it then. A
  // variable or parameter of the coroutine that it awaits is its own, and so is what was moved into
  // the group or then() that it awaits; another variable, or one in a container, counts as held by
  // others, so a child in there that works on variables of the coroutine may outlive them.
  detail::FutureAwaiter<T> operator co_await() const& {
    static_cast<void>(state("co_await"));
    return detail::FutureAwaiter<T>(*this, this);
  }
  detail::FutureAwaiter<T> operator co_await() && {
    static_cast<void>(state("co_await"));
    return detail::FutureAwaiter<T>(std::move(*this), nullptr);
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
    if (state_.get() == nullptr) [[unlikely]]
      detail::throw_empty_future(operation);
    return *state_.get();
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

  detail::HeldState<T> state_;
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
  // What Future::cancel() calls, on the cancelling thread; also what stops the work once all that
  // held the future have dropped it, one of them a coroutine that was asked to stop, on the thread
  // that dropped it last. What it throws is dropped.
  template <class F>
  requires(std::is_invocable_v<std::decay_t<F>&>) void on_cancel(F&& canceller) const {
    holder("on_cancel()")
        .state->set_canceller(
            [canceller = std::decay_t<F>(std::forward<F>(canceller))](detail::Cancel) mutable {
              canceller();
              return false;
            });
  }
  // For the layers below: the state of the future.
  [[nodiscard]] const std::shared_ptr<detail::FutureState<T>>& shared_state() const {
    return holder("shared_state()").state;
  }
  // For the layers below: as on_cancel(), as FutureStateBase has it.
  void set_canceller(detail::Canceller canceller) const {
    holder("set_canceller()").state->set_canceller(std::move(canceller));
  }

  // Completes with the outcome of `make`, following a Future it returns; with the error of `failed`
  // when that is not null.
  template <class Make>
  void fulfil(Make&& make, detail::FutureStateBase* failed = nullptr) const {
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
        holder("fulfil()").state->set_value(make());
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

  void follow(Future<T> followed) const {
    if (!followed.valid()) throw Error(ErrorCode::invalid_argument, detail::kReturnedEmptyFuture);
    auto interest = detail::make_interest(followed.state_.shared());
    followed = {};  // the interest alone holds it from here on
    const bool wanted = holder_->state->set_canceller(
        [interest](detail::Cancel how) { return interest->cancel(how); });
    if (!wanted && !interest->cancel(detail::Cancel::own_work)) {
      set_exception(detail::given_up_work());
      return;
    }
    interest->watch(detail::FutureStateBase::one_callback([promise = *this, interest] {
      if (interest->begin() == detail::Interest::Begin::no) return;
      const Future<T> inner(std::static_pointer_cast<detail::FutureState<T>>(interest->state()));
      try {
        if (inner.has_error()) {
          promise.set_exception(inner.state_->exception());
        } else if constexpr (std::is_void_v<T>) {
          promise.holder_->state->set_value();
        } else {
          promise.holder_->state->set_arrived(inner.state_->arrived());
          promise.holder_->state->set_value(inner.get());
        }
      } catch (...) {  // the value could not be copied
        promise.set_exception(std::current_exception());
      }
    }));
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
