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
class StopFlag;
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

// A list takes no memory while it is empty, nor when it goes over into another one.
using CallbackList =
    std::list<base::UniqueFunction<void()>, base::RecyclingAllocator<base::UniqueFunction<void()>>>;

// How far a cancellation goes.
enum class Cancel {
  all,       // also where others hold the outcome: Future::cancel()
  own_work,  // only work whose outcome nothing else holds: a coroutine that is asked to stop
};

// Stops the work behind a future. True, of own work: the future completes once that has ended.
// Else it is completed at once.
using Canceller = base::UniqueFunction<bool(Cancel)>;

// The part of a future's shared state that does not depend on its type: completion, waiting,
// callbacks, cancelling. Its holds are the Future handles of it, and what takes part in it for one
// (Interest), while it is not complete. Thread contract: any thread. Callbacks run exactly once, in
// the order they were added, on the thread that completes the state or, when it is complete,
// immediately on the thread that adds them; never under the lock. Callbacks of a state that a
// callback completes or finds complete run after that callback returns (a long chain needs no deep
// stack), or when it waits for a future.
class FutureStateBase {
 public:
  FutureStateBase() = default;
  virtual ~FutureStateBase() = default;
  FutureStateBase(const FutureStateBase&) = delete;
  FutureStateBase& operator=(const FutureStateBase&) = delete;

  // The id of the call whose outcome this is, 0 for what is not that of a call or has not started.
  // For reports of what threads wait for.
  [[nodiscard]] virtual std::uint64_t awaited_call() const noexcept { return 0; }

  [[nodiscard]] bool ready() const noexcept { return ready_.is_set(); }
  void wait() STITCH_EXCLUDES(mutex_);
  [[nodiscard]] bool wait_until(std::chrono::steady_clock::time_point deadline)
      STITCH_EXCLUDES(mutex_);
  void on_ready(base::UniqueFunction<void()> callback) STITCH_EXCLUDES(mutex_);
  // The same with its memory, one_callback(): adding it cannot fail.
  void on_ready(CallbackList callback) STITCH_EXCLUDES(mutex_);
  // Takes back one that was added so; nothing is done when the state is complete.
  void remove(CallbackList::iterator callback) noexcept STITCH_EXCLUDES(mutex_);
  [[nodiscard]] static CallbackList one_callback(base::UniqueFunction<void()> callback) {
    CallbackList list;
    list.push_back(std::move(callback));
    return list;
  }
  // False when it was complete already; the first completion counts.
  bool set_exception(std::exception_ptr exception) STITCH_EXCLUDES(mutex_);
  // REQUIRES: ready().
  [[nodiscard]] const std::exception_ptr& exception() const noexcept { return exception_; }

  // Calls the canceller and ask_to_stop(), then completes the state with `cancelled`, but where the
  // canceller says that it completes by itself. Does nothing when it is complete. `share`, of this
  // state: without one, the work of a chain of many may end after the state.
  void cancel(Cancel how = Cancel::all, std::shared_ptr<FutureStateBase> share = nullptr)
      STITCH_EXCLUDES(mutex_);
  // The last promise is gone. Does nothing when it is complete.
  void drop_promise() noexcept STITCH_EXCLUDES(mutex_);

  void add_hold() noexcept {
    if (!ready()) holds_.fetch_add(1, std::memory_order_relaxed);
  }
  void drop_hold() noexcept {
    if (ready()) return;
    if (holds_.fetch_sub(1, std::memory_order_acq_rel) == 1 &&
        given_up_.load(std::memory_order_relaxed)) [[unlikely]]
      stop_unheld();
  }
  // One of the holders does not want the outcome any more: once there are no holds, the work is
  // stopped. Without this, dropping every hold lets the work go on.
  void stop_once_unheld() noexcept { given_up_.store(true, std::memory_order_relaxed); }
  enum class GivenUp {
    complete,  // it was
    stopping,  // completes once its work has stopped
    goes_on,   // others hold it, or nothing can stop its work; as stop_once_unheld()
  };
  // One that has `own` holds, and keeps them, does not want the outcome any more. Stops the work
  // if nothing else holds it. `share`: as of cancel().
  [[nodiscard]] GivenUp give_up(unsigned own, std::shared_ptr<FutureStateBase> share) noexcept
      STITCH_EXCLUDES(mutex_);
  // For the future of a coroutine: it is one from now on, and `stop` is what its code sees.
  void set_coroutine(std::shared_ptr<rpc::StopFlag> stop) STITCH_EXCLUDES(mutex_);
  // What stops what the coroutine awaits, until clear_awaited(). False when the coroutine was asked
  // to stop while it awaited nothing: it is to be stopped now, once.
  [[nodiscard]] bool set_awaited(Canceller stop) STITCH_EXCLUDES(mutex_);
  void clear_awaited() STITCH_EXCLUDES(mutex_);
  // Stops what the coroutine behind this state awaits, which ends it in turn, or what it awaits
  // next; also where its future has been cancelled, and its code goes on. False, and nothing is
  // done, when it is not a coroutine that has awaited something.
  bool stop_coroutine() STITCH_EXCLUDES(mutex_);
  // For the coroutine behind this state, which goes on after it was asked to stop: its token says
  // so from here on, also where the thread for stop callbacks has not come to that yet.
  void show_stop() STITCH_EXCLUDES(mutex_);

  // What cancel() calls; dropped at completion. False, and it is not kept: the state is complete,
  // or was asked to stop while what was to end it went on: what this would stop is to be stopped.
  bool set_canceller(Canceller canceller) STITCH_EXCLUDES(mutex_);

  // The memory on devices that the outcome brings, null for none. Set before the outcome.
  void set_arrived(std::shared_ptr<const rpc::ArrivedMemory> memory) noexcept {
    arrived_ = std::move(memory);
  }
  // REQUIRES: ready().
  [[nodiscard]] const std::shared_ptr<const rpc::ArrivedMemory>& arrived() const noexcept {
    return arrived_;
  }
  // The code that runs here is given the outcome: before its value is. REQUIRES: ready().
  void hand_over() const {
    if (arrived_) [[unlikely]]
      hand_over_memory();
  }

 protected:
  // True for the one caller that may now store the outcome and must then publish() it.
  [[nodiscard]] bool claim() noexcept {
    return !claimed_.exchange(true, std::memory_order_acq_rel);
  }
  void publish() STITCH_EXCLUDES(mutex_);
  // As the canceller, for kinds of states that know how to stop their own work.
  virtual void ask_to_stop() {}
  [[nodiscard]] virtual bool stops_own_work() const noexcept { return false; }

  std::exception_ptr exception_;  // written between claim() and publish(), constant after

 private:
  void hand_over_memory() const;
  [[nodiscard]] bool can_stop() STITCH_REQUIRES(mutex_) {
    return coroutine_ || canceller_ || stops_own_work();
  }
  void stop_unheld() noexcept STITCH_EXCLUDES(mutex_);
  std::shared_ptr<const rpc::ArrivedMemory> arrived_;  // likewise, or before
  std::atomic<bool> claimed_{false};
  base::AwaitedFlag ready_;
  std::atomic<bool> given_up_{false};
  std::atomic<unsigned> holds_{0};
  base::Mutex mutex_;
  base::CondVar completed_;
  CallbackList callbacks_ STITCH_GUARDED_BY(mutex_);
  Canceller canceller_ STITCH_GUARDED_BY(mutex_);
  std::shared_ptr<rpc::StopFlag> coroutine_ STITCH_GUARDED_BY(mutex_);
  bool asked_to_stop_ STITCH_GUARDED_BY(mutex_) = false;
};

// The hold of what takes part in an outcome for a future of its own: a then(), a group, a served
// call. Its canceller and its callback come to an agreement: exactly one of them ends what it takes
// part for, and what is given up does not begin any more. Thread contract: any thread; who calls a
// method has a share of it.
class Interest {
 public:
  explicit Interest(std::shared_ptr<FutureStateBase> in) : in_(std::move(in)) { in_->add_hold(); }
  ~Interest() { drop_hold(); }
  Interest(const Interest&) = delete;
  Interest& operator=(const Interest&) = delete;
  [[nodiscard]] const std::shared_ptr<FutureStateBase>& state() const noexcept { return in_; }
  // Has `callback`, which calls begin() before it does anything, called once the state is complete.
  void watch(CallbackList callback) {
    callback_ = callback.begin();
    in_->on_ready(std::move(callback));
    if ((callback_state_.fetch_or(kWatches, std::memory_order_acq_rel) & kTakenBack) != 0)
      in_->remove(callback_);
  }
  enum class Begin : unsigned char {
    yes,
    stopped,  // it was given up, and its work has ended: end what it takes part for, and no more
    no,       // it was given up: that has been ended
  };
  [[nodiscard]] Begin begin() noexcept {
    Step step = Step::held;
    if (to(step, Step::begun)) return Begin::yes;
    if (step == Step::stopping && to(step, Step::begun)) return Begin::stopped;
    return Begin::no;
  }
  // All: cancels the state, or, where it is complete, the callback. Own work: gives the state up.
  // True: the callback has begun, or is called once the work has stopped. False: it is not called
  // any more, or, where it `stays`, begins no more; and what it was for is to be ended now.
  bool cancel(Cancel how, bool stays = false) {
    Step step = Step::held;
    if (how == Cancel::all) {
      if (!in_->ready()) {
        in_->cancel();
      } else {
        release();
      }
      return false;
    }
    if (!to(step, Step::stopping)) return step != Step::gone;
    if (in_->give_up(1, in_) != FutureStateBase::GivenUp::goes_on) return true;
    step = Step::stopping;
    if (!to(step, Step::gone)) return true;
    stays ? drop_hold() : take_back();
    return false;
  }
  // It takes part no more, unless its callback has begun. The work goes on.
  void release() noexcept {
    Step step = Step::held;
    if (to(step, Step::gone)) take_back();
  }

 private:
  enum class Step : unsigned char { held, begun, stopping, gone };
  bool to(Step& from, Step next) noexcept {
    return step_.compare_exchange_strong(from, next, std::memory_order_acq_rel);
  }
  void take_back() noexcept {
    if ((callback_state_.fetch_or(kTakenBack, std::memory_order_acq_rel) & kWatches) != 0)
      in_->remove(callback_);
    drop_hold();
  }
  void drop_hold() noexcept {
    if (holds_.exchange(false, std::memory_order_acq_rel)) in_->drop_hold();
  }

  static constexpr unsigned char kWatches = 1, kTakenBack = 2;
  const std::shared_ptr<FutureStateBase> in_;
  std::atomic<Step> step_{Step::held};
  std::atomic<unsigned char> callback_state_{0};
  std::atomic<bool> holds_{true};
  CallbackList::iterator callback_;  // constant once it watches
};
[[nodiscard]] inline std::shared_ptr<Interest> make_interest(std::shared_ptr<FutureStateBase> in) {
  return std::allocate_shared<Interest>(base::RecyclingAllocator<Interest>(), std::move(in));
}

// The outcome of what was given up.
[[nodiscard]] std::exception_ptr given_up_work() noexcept;
// The outcome of a promise that was not kept.
[[nodiscard]] std::exception_ptr dropped_promise() noexcept;

template <class T>
class FutureState : public FutureStateBase {
 public:
  using Stored = std::conditional_t<std::is_void_v<T>, std::monostate, T>;

  // False when it was complete already.
  template <class... Args>
  bool set_value(Args&&... args) {
    if (!claim()) return false;
    try {
      value_.emplace(std::forward<Args>(args)...);
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

// A state, or a kind of it, in recycled memory.
template <class State, class... Args>
[[nodiscard]] std::shared_ptr<State> make_state(Args&&... args) {
  return std::allocate_shared<State>(base::RecyclingAllocator<State>(),
                                     std::forward<Args>(args)...);
}

}  // namespace stitch::detail
