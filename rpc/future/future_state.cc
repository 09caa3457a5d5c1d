#include "stitch/rpc/future/future_state.h"

#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "stitch/base/answer_wait.h"
#include "stitch/base/callback_scope.h"
#include "stitch/rpc/future/execution_context.h"
#include "stitch/rpc/future/future.h"
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

std::atomic<std::uint64_t> thrown{0};

void take_first(CallbackList& callbacks, base::UniqueFunction<void()>& first) {
  first = std::move(callbacks.front());
  callbacks.pop_front();
}

void run_one(base::UniqueFunction<void()>& callback) noexcept {
  call_back("Future::on_ready()", callback);
  callback = nullptr;  // destroying what it held may add callbacks
}

// Runs `first` and all that it makes due, one after another, never one inside another. REQUIRES: no
// callback runs on this thread.
void run_all(base::UniqueFunction<void()>& first, CallbackList& waiting) noexcept {
  behind_callback = &waiting;
  run_one(first);
  while (!waiting.empty()) {
    take_first(waiting, first);
    run_one(first);
  }
  behind_callback = nullptr;
}

// Runs callbacks now; inside another one, after it.
void run_in_turn(CallbackList callbacks) noexcept {
  if (callbacks.empty()) return;
  if (behind_callback != nullptr) {
    behind_callback->splice(behind_callback->end(), callbacks);
    return;
  }
  base::UniqueFunction<void()> first;
  take_first(callbacks, first);
  run_all(first, callbacks);
}
void run_in_turn(base::UniqueFunction<void()> callback) noexcept {
  if (behind_callback != nullptr) {
    behind_callback->push_back(std::move(callback));
    return;
  }
  CallbackList waiting;
  run_all(callback, waiting);
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
      run_one(next);
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
  return std::make_exception_ptr(Error(code, text));
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

std::exception_ptr cancelled() noexcept {
  return exception_of(ErrorCode::cancelled, "future was cancelled by its holder");
}

void call_back(const char* kind, base::UniqueFunction<void()>& callback) noexcept {
  const base::CallbackScope callbacks;
  try {
    callback();
  } catch (...) {
    if (thrown.fetch_add(1) > 0) return;
    std::fprintf(stderr,
                 "stitch: a callback given to %s threw %s; it must not, and what it throws is "
                 "dropped (later ones are only counted)\n",
                 kind, describe(std::current_exception()).c_str());
  }
}

std::uint64_t callbacks_thrown() noexcept { return thrown.load(); }

void FutureStateBase::wait() {
  static_cast<void>(wait_until(std::chrono::steady_clock::time_point::max()));
}

bool FutureStateBase::wait_until(std::chrono::steady_clock::time_point deadline) {
  if (ready()) return true;
  const WaitingInside waiting;
  BlockingRegion blocking;
  const rpc::ThreadWaitScope noted(awaited_call());
  if (rpc::help_current_runtime(ready_, deadline)) return true;
  base::AnswerWait::give_up();
  base::MutexLock lock(mutex_);
  while (!ready()) {
    if (!completed_.wait_until(mutex_, deadline)) return ready();
  }
  return true;
}

void FutureStateBase::on_ready(base::UniqueFunction<void()> callback) noexcept {
  if (ready()) return run_in_turn(std::move(callback));
  CallbackList list;
  list.push_back(std::move(callback));
  on_ready(std::move(list));
}

void FutureStateBase::on_ready(CallbackList callback) noexcept {
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

bool FutureStateBase::set_exception(std::exception_ptr exception) noexcept {
  if (!claim()) return false;
  // A null one would make the state look as if it had a value.
  exception_ =
      exception ? std::move(exception)
                : exception_of(ErrorCode::invalid_argument, "promise was given a null exception");
  publish();
  return true;
}

void FutureStateBase::publish() noexcept {
  CallbackList callbacks;
  Canceller canceller;
  {
    base::MutexLock lock(mutex_);
    ready_.set();
    callbacks.swap(callbacks_);
    canceller = std::move(canceller_);
    completed_.notify_all();
  }
  canceller = nullptr;  // it may watch other futures: no more, once callbacks run
  run_in_turn(std::move(callbacks));
}

void FutureStateBase::drop_promise() noexcept {
  if (!ready())
    set_exception(exception_of(ErrorCode::cancelled, "promise was dropped before it was kept"));
}

void FutureStateBase::cancel() noexcept {
  if (ready()) return;
  ToStop more;
  ask(more);
  stop(std::move(more));
  set_exception(cancelled());
}

void FutureStateBase::stop(ToStop states) noexcept {
  while (!states.empty()) {
    const auto next = std::move(states.back());
    states.pop_back();
    if (next) next->ask(states);
  }
}

void FutureStateBase::ask(ToStop& more) noexcept {
  Canceller canceller;
  {
    base::MutexLock lock(mutex_);
    if (ready() || asked_to_stop_) return;
    asked_to_stop_ = true;
    canceller = std::move(canceller_);
  }
  if (canceller && canceller(more)) {
    base::MutexLock lock(mutex_);
    if (!ready()) std::swap(canceller_, canceller);  // its watches are needed until the work ends
    return;
  }
  ask_to_stop();
  set_exception(cancelled());
}

void FutureStateBase::set_canceller(Canceller canceller) noexcept {
  {
    base::MutexLock lock(mutex_);
    if (!asked_to_stop_) {
      if (!ready()) std::swap(canceller_, canceller);
      return;  // the former one is destroyed without the lock
    }
  }
  ToStop more;
  canceller(more);
  stop(std::move(more));
}

void FutureStateBase::pass_stops_to(const std::shared_ptr<FutureStateBase>& source) noexcept {
  set_canceller([weak = std::weak_ptr(source)](ToStop& more) {
    more.push_back(weak.lock());
    return true;
  });
}

void FutureStateBase::hand_over_memory() const { rpc::use_on_current_streams(*arrived_); }

}  // namespace stitch::detail
