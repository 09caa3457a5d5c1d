#include "stitch/rpc/future/future_state.h"

#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/answer_wait.h"
#include "stitch/rpc/future/execution_context.h"
#include "stitch/rpc/future/live_runtimes.h"
#include "stitch/rpc/future/thread_pool.h"
#include "stitch/rpc/future/thread_waits.h"

namespace stitch::detail {

namespace {

// libtorch's errors have the stack that raised them behind their reason; so has a text that quotes
// one.
std::optional<std::string> reason_of_torch_error(const std::exception& exception) {
  const char* const what = exception.what();
  const std::string text(what == nullptr ? "" : what);
  const auto stack = text.find("\nException raised from ");
  if (stack == std::string::npos) return std::nullopt;
  return text.substr(0, stack);
}
[[maybe_unused]] const bool reader_is_set = (set_reason_reader(&reason_of_torch_error), true);

// Callbacks that became due while another one runs on this thread; they run after it. Null: none
// runs, or it waits itself.
thread_local CallbackList* behind_callback = nullptr;

void take_first(CallbackList& callbacks, base::UniqueFunction<void()>& first) {
  first = std::move(callbacks.front());
  callbacks.pop_front();
}

// Runs `first` and all that it makes due, one after another, never one inside another. A callback
// should not throw; if one does, the others run all the same, and the first exception is rethrown
// at the end. REQUIRES: no callback runs on this thread.
void run_all(base::UniqueFunction<void()>& first, CallbackList& waiting) {
  behind_callback = &waiting;
  std::exception_ptr thrown;
  const auto run = [&thrown](base::UniqueFunction<void()>& callback) {
    try {
      callback();
    } catch (...) {
      if (!thrown) thrown = std::current_exception();
    }
    callback = nullptr;  // destroying what it held may add callbacks
  };
  run(first);
  while (!waiting.empty()) {
    take_first(waiting, first);
    run(first);
  }
  behind_callback = nullptr;
  if (thrown) std::rethrow_exception(thrown);
}

// Runs callbacks now; inside another one, after it.
void run_in_turn(CallbackList callbacks) {
  if (callbacks.empty()) return;
  if (behind_callback != nullptr) {
    behind_callback->splice(behind_callback->end(), callbacks);
    return;
  }
  base::UniqueFunction<void()> first;
  take_first(callbacks, first);
  run_all(first, callbacks);
}
void run_in_turn(base::UniqueFunction<void()> callback) {
  if (behind_callback == nullptr) {
    CallbackList waiting;
    run_all(callback, waiting);
    return;
  }
  try {
    behind_callback->push_back(std::move(callback));
  } catch (const std::bad_alloc&) {
    callback();
  }
}

// For a chain of cancellers, each of which cancels the next.
constexpr int kMaxNestedCancellers = 64;
thread_local int cancellers_running = 0;
class CancellerRunning {
 public:
  CancellerRunning() { ++cancellers_running; }
  ~CancellerRunning() { --cancellers_running; }
  CancellerRunning(const CancellerRunning&) = delete;
  CancellerRunning& operator=(const CancellerRunning&) = delete;
};

// What it throws is dropped: where it has no memory for all that it does, the future is cancelled
// all the same.
bool call_canceller(Canceller& canceller, Cancel how) noexcept {
  const CancellerRunning running;
  try {
    return canceller(how);
  } catch (...) {
    return false;
  }
}

// Later, if many are nested: then `state`, if there is one, is completed there.
bool run_canceller(Canceller& canceller, Cancel how,
                   std::shared_ptr<FutureStateBase> state) noexcept {
  if (!canceller) return false;
  if (cancellers_running < kMaxNestedCancellers) return call_canceller(canceller, how);
  struct Later {
    Canceller canceller;
    std::shared_ptr<FutureStateBase> state;
  };
  std::unique_ptr<Later> later(new (std::nothrow) Later());
  if (!later) return call_canceller(canceller, how);
  later->canceller = std::move(canceller);
  const bool is_completed_there = state != nullptr;
  later->state = std::move(state);
  try {
    run_in_turn([later = std::move(later), how] {
      if (!call_canceller(later->canceller, how) && later->state)
        later->state->set_exception(given_up_work());
    });
  } catch (...) {
    // Thrown by a callback, which must not throw.
  }
  return is_completed_there;
}

// A callback waits for a future, which a callback queued behind it may complete: runs those first.
class WaitingInside {
 public:
  WaitingInside() {
    if (behind_callback == nullptr) return;
    base::AnswerWait::give_up();
    while (!behind_callback->empty()) {
      base::UniqueFunction<void()> next;
      take_first(*behind_callback, next);
      next();
    }
    outer_ = std::exchange(behind_callback, nullptr);
  }
  ~WaitingInside() {
    if (outer_ != nullptr) behind_callback = outer_;
  }
  WaitingInside(const WaitingInside&) = delete;
  WaitingInside& operator=(const WaitingInside&) = delete;

 private:
  CallbackList* outer_ = nullptr;
};

std::exception_ptr exception_of(ErrorCode code, const char* text) noexcept {
  try {
    return std::make_exception_ptr(Error(code, text));
  } catch (...) {
    return std::current_exception();  // no memory for that
  }
}

}  // namespace

void throw_empty_future(const char* operation) {
  throw Error(
      ErrorCode::invalid_argument,
      std::string(operation) + " of an empty future: one made by default, or one moved from");
}

void throw_empty_promise(const char* operation) {
  throw Error(ErrorCode::invalid_argument,
              std::string(operation) + " of a promise that was moved from");
}

std::exception_ptr dropped_promise() noexcept {
  return exception_of(ErrorCode::cancelled, "promise was dropped before it was kept");
}

void FutureStateBase::wait() {
  static_cast<void>(wait_until(std::chrono::steady_clock::time_point::max()));
}

bool FutureStateBase::wait_until(std::chrono::steady_clock::time_point deadline) {
  if (ready()) return true;
  const WaitingInside waiting;
  rpc::BlockingRegion blocking;
  const rpc::ThreadWaitScope noted(awaited_call());
  if (rpc::help_current_runtime(ready_, deadline)) return true;
  base::AnswerWait::give_up();
  base::MutexLock lock(mutex_);
  while (!ready()) {
    if (!completed_.wait_until(mutex_, deadline)) return ready();
  }
  return true;
}

void FutureStateBase::on_ready(base::UniqueFunction<void()> callback) {
  if (ready()) {
    run_in_turn(std::move(callback));
  } else {
    on_ready(one_callback(std::move(callback)));
  }
}

void FutureStateBase::on_ready(CallbackList callback) {
  {
    base::MutexLock lock(mutex_);
    if (!ready()) {
      callbacks_.splice(callbacks_.end(), callback);
      return;
    }
  }
  run_in_turn(std::move(callback));
}

void FutureStateBase::remove(CallbackList::iterator callback) noexcept {
  CallbackList removed;  // destroyed without the lock
  base::MutexLock lock(mutex_);
  if (!ready()) removed.splice(removed.end(), callbacks_, callback);
  lock.unlock();
}

bool FutureStateBase::set_exception(std::exception_ptr exception) {
  // One would make the state look as if it had a value.
  if (!exception)
    exception = exception_of(ErrorCode::invalid_argument, "promise was given a null exception");
  if (!claim()) return false;
  exception_ = std::move(exception);
  publish();
  return true;
}

void FutureStateBase::publish() {
  CallbackList callbacks;
  Canceller canceller;
  {
    base::MutexLock lock(mutex_);
    ready_.set();
    callbacks.swap(callbacks_);
    if (!coroutine_) canceller = std::move(canceller_);  // its code may go on
    completed_.notify_all();
  }
  run_in_turn(std::move(callbacks));
}

void FutureStateBase::set_coroutine(std::shared_ptr<rpc::StopFlag> stop) {
  base::MutexLock lock(mutex_);
  coroutine_ = std::move(stop);
}

bool FutureStateBase::set_awaited(Canceller stop) {
  base::MutexLock lock(mutex_);
  // Not kept then: it would stop this once more instead of what is awaited next.
  if (std::exchange(asked_to_stop_, false)) return false;
  std::swap(canceller_, stop);
  lock.unlock();  // before the former one is destroyed
  return true;
}

void FutureStateBase::clear_awaited() {
  Canceller canceller;  // destroyed without the lock
  base::MutexLock lock(mutex_);
  canceller = std::move(canceller_);
  lock.unlock();
}

bool FutureStateBase::stop_coroutine() {
  Canceller canceller;
  std::shared_ptr<rpc::StopFlag> stop;
  {
    base::MutexLock lock(mutex_);
    if (!coroutine_) return false;
    stop = coroutine_;
    canceller = std::move(canceller_);
    if (!canceller) asked_to_stop_ = true;
  }
  stop->request_apart();
  static_cast<void>(run_canceller(canceller, Cancel::own_work, nullptr));
  return true;
}

void FutureStateBase::show_stop() {
  std::shared_ptr<rpc::StopFlag> stop;
  {
    base::MutexLock lock(mutex_);
    stop = coroutine_;
  }
  if (stop) stop->show();
}

void FutureStateBase::drop_promise() noexcept {
  if (ready()) return;
  bool given_up = false;
  {
    base::MutexLock lock(mutex_);
    given_up = asked_to_stop_ && !coroutine_;
  }
  set_exception(given_up ? given_up_work() : dropped_promise());
}

void FutureStateBase::cancel(Cancel how, std::shared_ptr<FutureStateBase> share) {
  Canceller canceller;
  std::shared_ptr<rpc::StopFlag> stop;
  {
    base::MutexLock lock(mutex_);
    if (ready()) return;
    stop = coroutine_;
    canceller = std::move(canceller_);
    if (stop ? !canceller : how == Cancel::own_work) asked_to_stop_ = true;
  }
  if (stop) how == Cancel::all ? stop->request() : stop->request_apart();
  const bool ends_by_itself =
      run_canceller(canceller, how, how == Cancel::own_work ? std::move(share) : nullptr);
  ask_to_stop();
  if (ends_by_itself && how == Cancel::own_work) return;
  set_exception(exception_of(ErrorCode::cancelled, "future was cancelled by its holder"));
}

FutureStateBase::GivenUp FutureStateBase::give_up(unsigned own,
                                                  std::shared_ptr<FutureStateBase> share) noexcept {
  stop_once_unheld();
  {
    base::MutexLock lock(mutex_);
    if (ready()) return GivenUp::complete;
    if (holds_.load(std::memory_order_acquire) > own || !can_stop()) return GivenUp::goes_on;
  }
  try {
    if (!stop_coroutine()) cancel(Cancel::own_work, std::move(share));
  } catch (...) {
    // Thrown by a callback, which must not throw.
  }
  return GivenUp::stopping;
}

void FutureStateBase::stop_unheld() noexcept { static_cast<void>(give_up(0, nullptr)); }

void FutureStateBase::hand_over_memory() const { rpc::use_on_current_streams(*arrived_); }

bool FutureStateBase::set_canceller(Canceller canceller) {
  base::MutexLock lock(mutex_);
  const bool kept = !ready() && !asked_to_stop_;
  if (kept) std::swap(canceller_, canceller);
  lock.unlock();  // before the former one is destroyed
  return kept;
}

std::exception_ptr given_up_work() noexcept {
  return exception_of(ErrorCode::cancelled, "it was given up by the only one that waited for it");
}

}  // namespace stitch::detail
