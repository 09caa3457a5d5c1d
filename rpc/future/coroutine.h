#pragma once

#include <atomic>
#include <coroutine>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <type_traits>
#include <utility>

#include "stitch/base/recycler.h"
#include "stitch/rpc/future/future.h"

// What makes Future<T> awaitable and a coroutine return type. Included by future.h.
namespace stitch::detail {

// One wait of a coroutine for a future. Ends once: when the future completes, or when the coroutine
// is asked to stop and the future goes on without it. Thread contract: any thread; complete() and
// stop() may come at the same time.
class Awaiting {
 public:
  // `own` are the holds of `awaited` that end with the coroutine, whose future is `coroutine`.
  Awaiting(std::weak_ptr<FutureStateBase> awaited, unsigned own,
           std::weak_ptr<FutureStateBase> coroutine, rpc::Continuation rest)
      : awaited_(std::move(awaited)),
        own_(own),
        coroutine_(std::move(coroutine)),
        rest_(std::move(rest)) {}
  // What on_ready() of the awaited state is called with, with its memory.
  [[nodiscard]] static CallbackList completion(const std::shared_ptr<Awaiting>& awaiting);
  // on_ready() has been called: from here on stop() can be obeyed.
  void registered();
  void stop();
  // For the coroutine, once it goes on: it was asked to stop, and has no outcome.
  [[nodiscard]] bool stopped() const noexcept { return stopped_; }
  // The same: it was asked to stop, and has an outcome or not.
  [[nodiscard]] bool asked_to_stop() const noexcept {
    return (state_.load(std::memory_order_acquire) & kToStop) != 0;
  }
  // The same: it has a value. If it was asked to stop, what it awaits next stops.
  void has_value();

 private:
  void complete();
  void stop_now();
  void stop_next();

  const std::weak_ptr<FutureStateBase> awaited_;
  const unsigned own_;
  const std::weak_ptr<FutureStateBase> coroutine_;  // empty for a coroutine of another kind
  rpc::Continuation rest_;
  CallbackList::iterator completion_;
  static constexpr unsigned kRegistered = 1, kToStop = 2, kGoesOn = 4, kNextStops = 8;
  std::atomic<unsigned> state_{0};
  bool stopped_ = false;  // written before rest_ runs
};
[[noreturn]] void throw_stopped();

template <class T>
class FutureAwaiter {
 public:
  // `variable` is what the coroutine awaits, null for a temporary.
  FutureAwaiter(Future<T> future, const void* variable)
      : future_(std::move(future)), variable_(variable) {}
  [[nodiscard]] bool await_ready() const noexcept { return future_.ready(); }
  // Not inlined: its locals must not be in the frame, which may be gone before it returns.
  template <class P>
  [[gnu::noinline]] void await_suspend(std::coroutine_handle<P> coroutine) {
    rpc::ExecutionContext inside = rpc::ExecutionContext::captured();
    unsigned own = 1;
    if constexpr (requires { coroutine.promise().await(inside); }) {
      outcome_ = coroutine.promise().await(inside);
      if (P::holds(coroutine.address(), variable_)) ++own;
    }
    // With all the memory that it needs: from here on nothing can fail.
    const auto awaiting = std::allocate_shared<Awaiting>(
        base::RecyclingAllocator<Awaiting>(), future_.shared_state(), own, outcome_,
        rpc::Continuation(std::move(inside), [coroutine] { coroutine.resume(); }));
    awaiting_ = awaiting;
    CallbackList completion = Awaiting::completion(awaiting);
    const bool go_on = !outcome_ || outcome_->set_awaited([awaiting](Cancel) {
      awaiting->stop();
      return false;
    });
    // The coroutine's scopes (a WorkerScope, a Context) stay with the coroutine; its caller gets
    // back what it had. This comes first: once the callback is registered, another thread may
    // finish the coroutine and free everything here.
    if constexpr (requires { coroutine.promise().outside(); })
      rpc::ExecutionContext::current() = coroutine.promise().outside();
    const auto state = future_.shared_state();
    try {
      state->on_ready(std::move(completion));
    } catch (...) {
      // Thrown by a callback, which must not throw; the coroutine may have ended meanwhile.
    }
    // Nothing of the coroutine is touched any more.
    awaiting->registered();
    if (!go_on) awaiting->stop();
  }
  T await_resume() {
    if (outcome_) outcome_->clear_awaited();
    if (awaiting_) {
      if (outcome_ && awaiting_->asked_to_stop()) [[unlikely]]
        outcome_->show_stop();
      if (awaiting_->stopped()) throw_stopped();
      if (!future_.has_error()) awaiting_->has_value();
    }
    return std::move(future_).get();
  }

 private:
  Future<T> future_;
  const void* variable_;
  std::shared_ptr<FutureStateBase> outcome_;  // of the coroutine that awaits it
  std::shared_ptr<Awaiting> awaiting_;        // null if there was nothing to wait for
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
  [[nodiscard]] std::shared_ptr<FutureStateBase> await(rpc::ExecutionContext& inside) {
    const std::shared_ptr<FutureStateBase> outcome = promise_.shared_state();
    if (!stop_) {
      stop_ = std::allocate_shared<rpc::StopFlag>(base::RecyclingAllocator<rpc::StopFlag>(),
                                                  inside.stop, inside.runtime);
      outcome->set_coroutine(stop_);
    }
    inside.stop = stop_;
    return outcome;
  }
  // Whether `variable` lies in the frame at `frame`: it ends with the coroutine.
  [[nodiscard]] static bool holds(const void* frame, const void* variable) noexcept {
    const auto* const begin = static_cast<const std::byte*>(frame);
    return !std::less<>()(variable, frame) &&
           std::less<>()(variable, static_cast<const void*>(begin + size_of(begin)));
  }
  // The frame, behind its size.
  static void* operator new(std::size_t bytes) {
    auto* const at = static_cast<std::byte*>(base::take_recycled(bytes + kBeforeFrame));
    ::new (static_cast<void*>(at)) std::size_t(bytes);
    return at + kBeforeFrame;
  }
  static void operator delete(void* frame) noexcept {
    auto* const at = static_cast<std::byte*>(frame);
    base::recycle(at - kBeforeFrame, size_of(at) + kBeforeFrame);
  }
  // What was current where the coroutine was started.
  [[nodiscard]] const rpc::ExecutionContext& outside() const noexcept { return outside_; }

 protected:
  Promise<T> promise_;
  std::exception_ptr thrown_;

 private:
  static constexpr std::size_t kBeforeFrame = 64;  // recycled blocks are aligned so
  [[nodiscard]] static std::size_t size_of(const std::byte* frame) noexcept {
    return *std::launder(reinterpret_cast<const std::size_t*>(frame - kBeforeFrame));
  }

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
