#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <stop_token>
#include <utility>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/base/recycler.h"
#include "stitch/base/unique_function.h"
#include "stitch/rpc/future/future_state.h"

namespace stitch::rpc {

using Clock = std::chrono::steady_clock;

class ArrivedMemory;
class Runtime;
class StreamSet;
struct Autocast;

// As ArrivedMemory::use_on_current_streams().
void use_on_current_streams(const ArrivedMemory& memory);
// The memory of all of them; any may be null. Null where there is none.
[[nodiscard]] std::shared_ptr<const ArrivedMemory> together(
    std::vector<std::shared_ptr<const ArrivedMemory>> parts);

// The stop of a served call or of a coroutine: a flag, a stop token, and the awaited future, which
// stops with it. The std::stop_source is made when the token is first taken, which most calls never
// do. Shared by the code that runs and its canceller. Thread contract: any thread.
class StopFlag {
 public:
  // That of a served call.
  StopFlag() : call_(this) {}
  // That of a coroutine, made under `outer` (may be null).
  explicit StopFlag(const StopFlag* outer) : call_(outer == nullptr ? nullptr : outer->call_) {}

  // Sets the token, then adds the awaited future to `more`, so that code resumed by the stop finds
  // the token set. Where a token was taken, a thread of `runtime` for stop callbacks does both;
  // this thread if `runtime` is null. Without `with_work` only the token is set.
  void request(const std::shared_ptr<Runtime>& runtime, detail::ToStop& more, bool with_work = true)
      STITCH_EXCLUDES(mutex_);
  [[nodiscard]] bool requested() const noexcept {
    return requested_.load(std::memory_order_acquire);
  }
  [[nodiscard]] std::stop_token token() STITCH_EXCLUDES(mutex_);

  // A stop goes on to `state` from now on. True: a stop has come before, and has to go on now.
  [[nodiscard]] bool awaits(const std::shared_ptr<detail::FutureStateBase>& state)
      STITCH_EXCLUDES(mutex_);
  // The wait is over. A stop that came during the wait goes on to the next one, unless this one has
  // ended with an error, and the stop has been noticed by that.
  void resumed(bool with_error) STITCH_EXCLUDES(mutex_);

  // Stands for the served call that it belongs to; null for none. Compared only.
  [[nodiscard]] const void* call() const noexcept { return call_; }

 private:
  const void* const call_;
  std::atomic<bool> requested_{false};  // written under mutex_
  base::Mutex mutex_;
  bool to_pass_on_ STITCH_GUARDED_BY(mutex_) = false;  // to what is awaited, now or next
  std::weak_ptr<detail::FutureStateBase> awaited_ STITCH_GUARDED_BY(mutex_);
  std::optional<std::stop_source> source_ STITCH_GUARDED_BY(mutex_);
};

// The surroundings of running code: its worker, the inherited deadline, the stop flag, the autograd
// context, and the caller's grad mode, autocast and current streams. A handler starts with those of
// its call; continuations and coroutines keep those under which they were made, on any thread.
struct ExecutionContext {
  std::shared_ptr<Runtime> runtime;  // the worker's; null: none is current
  Clock::time_point deadline = Clock::time_point::max();
  std::shared_ptr<StopFlag> stop;  // null: it cannot be asked to stop
  // Untyped: only the layer of distributed autograd, far above, knows what it is.
  std::shared_ptr<const void> autograd_context;
  bool no_grad = false;                      // false leaves the thread's grad mode as it is
  std::shared_ptr<const Autocast> autocast;  // null leaves the thread's autocast as it is
  std::shared_ptr<const StreamSet> streams;  // null leaves the thread's current streams as they are

  // This thread's. A plain thread-local: only its own thread touches it.
  [[nodiscard]] static ExecutionContext& current() noexcept;
  // A copy of this thread's for what runs later: with the process's only worker where none is
  // current.
  [[nodiscard]] static ExecutionContext captured();
};

// Libtorch's grad mode of this thread. True when it was on.
bool turn_grad_off() noexcept;
void turn_grad_on() noexcept;
// Makes an ExecutionContext current on this thread for a block. Blocks nest.
class ExecutionContextScope {
 public:
  explicit ExecutionContextScope(ExecutionContext context)
      : ExecutionContextScope(std::exchange(ExecutionContext::current(), std::move(context)),
                              Exchanged()) {
    if (ExecutionContext::current().streams || ExecutionContext::current().autocast) [[unlikely]]
      enter();
  }
  ~ExecutionContextScope() {
    if (torch_state_) [[unlikely]]
      torch_state_.reset();
    if (turned_grad_off_) turn_grad_on();
    ExecutionContext::current() = std::move(outer_);
  }
  ExecutionContextScope(const ExecutionContextScope&) = delete;
  ExecutionContextScope& operator=(const ExecutionContextScope&) = delete;

 private:
  struct Exchanged {};
  // The destructor undoes this if what follows throws.
  ExecutionContextScope(ExecutionContext outer, Exchanged) noexcept
      : outer_(std::move(outer)),
        turned_grad_off_(ExecutionContext::current().no_grad && turn_grad_off()) {}
  void enter();
  ExecutionContext outer_;
  bool turned_grad_off_;
  // The streams and autocast that were current; null where neither was changed.
  std::shared_ptr<const void> torch_state_;
};

// A task that runs later, under `context`. Thread contract: one thread at a time.
class Continuation {
 public:
  Continuation(ExecutionContext context, base::UniqueFunction<void()> task)
      : work_(new Work{std::move(context), std::move(task)}) {}
  // Runs the task, once: on the thread pool of the context's worker; without one, on that of any
  // worker of this process, so that it may wait; on this thread, before returning, when there is
  // none, or it has stopped.
  void run() &&;

 private:
  struct Work {
    ExecutionContext context;
    base::UniqueFunction<void()> task;
    static void* operator new(std::size_t bytes) { return base::take_recycled(bytes); }
    static void operator delete(void* at) noexcept { base::recycle(at, sizeof(Work)); }
  };
  static void run_work(Work& work);
  std::unique_ptr<Work> work_;
};

}  // namespace stitch::rpc

namespace stitch {

// Tells the handler running on this thread that its caller has cancelled the call or is lost, or
// that its deadline has passed; a coroutine that has awaited something, that it was asked to stop.
// A std::stop_callback on it runs on a thread reserved for such callbacks, however busy the
// handlers are; it may wait for futures. What the call or the coroutine awaits is stopped after it.
[[nodiscard]] std::stop_token current_stop_token();

}  // namespace stitch
