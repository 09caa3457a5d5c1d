#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/base/recycler.h"
#include "stitch/base/unique_function.h"

namespace stitch::rpc {
class ArrivedMemory;
}  // namespace stitch::rpc

namespace stitch::detail {

// Whether a T can be copied. std::is_copy_constructible is true even for
// std::vector<std::unique_ptr<T>>; this looks at the element type.
template <class T>
struct IsCopyable : std::is_copy_constructible<T> {};
template <class... Ts>
struct AllCopyable : std::conjunction<IsCopyable<std::remove_cv_t<Ts>>...> {};
template <class T>
requires(requires {
  typename T::value_type;
  typename T::const_iterator;
} && !std::is_same_v<std::remove_cv_t<typename T::value_type>, T>) struct IsCopyable<T>
    : std::conjunction<std::is_copy_constructible<T>, AllCopyable<typename T::value_type>> {
};
template <class T>
struct IsCopyable<std::optional<T>> : AllCopyable<T> {};
template <class A, class B>
struct IsCopyable<std::pair<A, B>> : AllCopyable<A, B> {};
template <class... Ts>
struct IsCopyable<std::tuple<Ts...>> : AllCopyable<Ts...> {};
template <class... Ts>
struct IsCopyable<std::variant<Ts...>> : AllCopyable<Ts...> {};
template <class T>
inline constexpr bool kCopyable = IsCopyable<T>::value;

// Lists need no memory while they are empty, nor for splicing.
using CallbackList =
    std::list<base::UniqueFunction<void()>, base::RecyclingAllocator<base::UniqueFunction<void()>>>;

class FutureStateBase;
// Futures whose work is still to be asked to stop.
using ToStop = std::vector<std::shared_ptr<FutureStateBase>>;
// Asks the work behind a future to stop, and adds the futures that the work awaits to `more`. True:
// the work completes the future when it ends. False: the future completes with `cancelled` now.
using Canceller = base::UniqueFunction<bool(ToStop& more)>;

// The part of a future's shared state that does not depend on its type: completion, waiting,
// callbacks, cancelling. Shared by futures, promises and the work. Thread contract: any thread.
// Callbacks run exactly once, in the order in which they were added, never under the lock: on the
// thread that completes the state, or at once on the thread that adds them to a complete state.
// Inside another callback, they run when that one returns or waits for a future, so a long chain
// needs no deep stack. A callback that throws is reported on stderr, the first time, and counted.
class FutureStateBase {
 public:
  FutureStateBase() = default;
  virtual ~FutureStateBase() = default;

  // The id of the call whose outcome this is, for reports of waits; 0 for other outcomes, and for a
  // call that has not started.
  [[nodiscard]] virtual std::uint64_t awaited_call() const noexcept { return 0; }

  [[nodiscard]] bool ready() const noexcept { return ready_.is_set(); }
  void wait() STITCH_EXCLUDES(mutex_);
  [[nodiscard]] bool wait_until(std::chrono::steady_clock::time_point deadline)
      STITCH_EXCLUDES(mutex_);
  void on_ready(base::UniqueFunction<void()> callback) noexcept STITCH_EXCLUDES(mutex_);
  // False when it was complete already; the first completion counts.
  bool set_exception(std::exception_ptr exception) noexcept STITCH_EXCLUDES(mutex_);
  // REQUIRES: ready().
  [[nodiscard]] const std::exception_ptr& exception() const noexcept { return exception_; }
  // The last promise is gone. Does nothing when the state is complete.
  void drop_promise() noexcept STITCH_EXCLUDES(mutex_);

  // Asks the work to stop, then completes the state with `cancelled`. Does nothing for a complete
  // state.
  void cancel() noexcept STITCH_EXCLUDES(mutex_);
  // Asks the work behind these futures to stop, and the work that it awaits in turn, once each.
  // Iterates, so a long chain needs no deep stack.
  static void stop(ToStop states) noexcept;
  // Whether cancel() or stop() has asked the work to stop.
  [[nodiscard]] bool asked_to_stop() const noexcept {
    return asked_to_stop_.load(std::memory_order_acquire);
  }
  // Replaces the canceller, which is dropped when the state completes. Calls the new one at once
  // when the work has already been asked to stop.
  void set_canceller(Canceller canceller) noexcept STITCH_EXCLUDES(mutex_);
  // A stop goes on to `source`, whose end completes this state.
  void pass_stops_to(const std::shared_ptr<FutureStateBase>& source) noexcept;

  // The memory on devices that the value brings, null for none. REQUIRES: ready().
  [[nodiscard]] const std::shared_ptr<const rpc::ArrivedMemory>& arrived() const noexcept {
    return arrived_;
  }
  // Orders this thread's current streams behind the memory of the value, which the caller takes
  // next. REQUIRES: ready().
  void hand_over() const {
    if (arrived_) [[unlikely]]
      hand_over_memory();
  }

 protected:
  // True for the one caller that may now store the outcome and must then publish() it.
  [[nodiscard]] bool claim() noexcept {
    return !claimed_.exchange(true, std::memory_order_acq_rel);
  }
  void publish() noexcept STITCH_EXCLUDES(mutex_);
  // The canceller of kinds of states that stop their own work.
  virtual void ask_to_stop() {}

  // Written between claim() and publish(), constant after.
  std::exception_ptr exception_;
  std::shared_ptr<const rpc::ArrivedMemory> arrived_;

 private:
  friend class Watch;
  void on_ready(CallbackList callback) noexcept STITCH_EXCLUDES(mutex_);
  void remove(CallbackList::iterator callback) noexcept STITCH_EXCLUDES(mutex_);
  void ask(ToStop& more) noexcept STITCH_EXCLUDES(mutex_);
  void hand_over_memory() const;

  std::atomic<bool> claimed_{false};
  base::AwaitedFlag ready_;
  std::atomic<bool> asked_to_stop_{false};  // written under mutex_
  base::Mutex mutex_;
  base::CondVar completed_;
  CallbackList callbacks_ STITCH_GUARDED_BY(mutex_);
  Canceller canceller_ STITCH_GUARDED_BY(mutex_);
};

// A callback of a future that ends with this object, unless it has begun by then. Thread contract:
// one thread at a time.
class Watch {
 public:
  Watch(const std::shared_ptr<FutureStateBase>& state, base::UniqueFunction<void()> callback)
      : state_(state) {
    CallbackList list;
    list.push_back(std::move(callback));
    callback_ = list.begin();
    state->on_ready(std::move(list));
  }
  ~Watch() {
    if (const auto state = state_.lock()) state->remove(callback_);
  }
  Watch(Watch&&) noexcept = default;  // leaves `other` without a callback
  Watch& operator=(Watch&&) = delete;
  // Null when the future is gone.
  [[nodiscard]] std::shared_ptr<FutureStateBase> state() const noexcept { return state_.lock(); }

 private:
  std::weak_ptr<FutureStateBase> state_;
  CallbackList::iterator callback_;
};

// The outcome of a cancelled future.
[[nodiscard]] std::exception_ptr cancelled() noexcept;
// Calls a callback of the program. An exception is reported on stderr, the first time in this
// process, and counted. `kind` names the function that took the callback: "Future::on_ready()".
void call_back(const char* kind, base::UniqueFunction<void()>& callback) noexcept;
// The number of callbacks that have thrown.
[[nodiscard]] std::uint64_t callbacks_thrown() noexcept;

template <class T>
class FutureState : public FutureStateBase {
 public:
  using Stored = std::conditional_t<std::is_void_v<T>, std::monostate, T>;

  // False when it was complete already.
  template <class... Args>
  bool set_value(Args&&... args) {
    return set_value_with(nullptr, std::forward<Args>(args)...);
  }
  // The same with the memory on devices that the value brings.
  template <class... Args>
  bool set_value_with(std::shared_ptr<const rpc::ArrivedMemory> arrived, Args&&... args) {
    if (!claim()) return false;
    arrived_ = std::move(arrived);
    try {
      value_.emplace(std::forward<Args>(args)...);
    } catch (...) {
      exception_ = std::current_exception();
    }
    publish();
    return true;
  }
  // Completes with the outcome of `from`, which is complete; a value that cannot be copied is moved
  // out of it. False as above.
  bool take_outcome(FutureState& from) noexcept {
    if (!claim()) return false;
    arrived_ = from.arrived();
    exception_ = from.exception();
    try {
      if (exception_ == nullptr) {
        if constexpr (kCopyable<Stored>) {
          value_.emplace(from.value());
        } else {
          value_.emplace(std::move(from.value()));
        }
      }
    } catch (...) {
      exception_ = std::current_exception();
    }
    publish();
    return true;
  }
  // REQUIRES: ready() without an exception.
  [[nodiscard]] Stored& value() noexcept { return *value_; }

 private:
  std::optional<Stored> value_;
};

// Makes a state of any kind in recycled memory.
template <class State, class... Args>
[[nodiscard]] std::shared_ptr<State> make_state(Args&&... args) {
  return std::allocate_shared<State>(base::RecyclingAllocator<State>(),
                                     std::forward<Args>(args)...);
}

}  // namespace stitch::detail
