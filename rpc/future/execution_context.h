#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <stop_token>
#include <utility>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"
#include "stitch/rpc/future/runtime.h"

namespace stitch::rpc {

class ArrivedMemory;
class ScopeMemory;
class StreamSet;
struct Autocast;

// As ArrivedMemory::use_on_current_streams().
void use_on_current_streams(const ArrivedMemory& memory);
// The memory of all of them; any may be null. Null where there is none.
[[nodiscard]] std::shared_ptr<const ArrivedMemory> together(
    std::vector<std::shared_ptr<const ArrivedMemory>> parts);

// Whether a call was asked to stop. The std::stop_source behind it is made when its token is first
// taken: most calls are never cancelled and never look. Shared. Thread contract: any thread;
// request() runs stop callbacks, under no lock.
class StopFlag {
 public:
  StopFlag() = default;
  // Also asked when `outer` is. `runtime`: whose threads stop callbacks run on, for
  // request_apart(); it need not exist.
  StopFlag(std::shared_ptr<StopFlag> outer, std::weak_ptr<Runtime> runtime)
      : outer_(std::move(outer)), runtime_(std::move(runtime)) {}
  void request() STITCH_EXCLUDES(mutex_);
  // The same for a thread that must not wait: stop callbacks run on one that may.
  void request_apart() STITCH_EXCLUDES(mutex_);
  // If it was requested, the token says so from here on, and so do those of kMaxNestedStops flags
  // outwards, where these were: stop callbacks that have not begun run here.
  void show() STITCH_EXCLUDES(mutex_);
  // As request(), but leaves it to the caller to call request_stop() with the source, which runs
  // the stop callbacks. Empty when that is not needed: no token was taken, or it was requested
  // before.
  [[nodiscard]] std::optional<std::stop_source> raise() STITCH_EXCLUDES(mutex_);
  // Requests the stop of a source, and of those inside it, each amid the callbacks of the one
  // around it; beyond kMaxNestedStops after these, so that coroutines may be nested as deeply as
  // memory allows. Returns once all have been requested.
  static void request_stop(std::stop_source source);
  static constexpr int kMaxNestedStops = 256;
  [[nodiscard]] bool requested() const noexcept {
    for (const StopFlag* flag = this; flag != nullptr; flag = flag->outer_.get()) {
      if (flag->requested_.load(std::memory_order_acquire)) return true;
    }
    return false;
  }
  [[nodiscard]] std::stop_token token();
  // That of the call being served, for one inside it.
  [[nodiscard]] const StopFlag* outermost() const noexcept {
    const StopFlag* flag = this;
    while (flag->outer_) flag = flag->outer_.get();
    return flag;
  }

 private:
  struct PassOn {
    std::stop_source to;
    void operator()();
  };
  // The token, if there is one.
  [[nodiscard]] std::optional<std::stop_token> made_token() STITCH_EXCLUDES(mutex_);
  // REQUIRES: outer_, if any, has one. `requested`: it, or one that it is inside.
  void make_token(bool requested) STITCH_EXCLUDES(mutex_);

  const std::shared_ptr<StopFlag> outer_;
  const std::weak_ptr<Runtime> runtime_{};
  std::atomic<bool> requested_{false};
  base::Mutex mutex_;
  std::optional<std::stop_source> source_ STITCH_GUARDED_BY(mutex_);
  std::optional<std::stop_callback<PassOn>> of_outer_ STITCH_GUARDED_BY(mutex_);
};

// What surrounds code while it runs: the worker it runs on, the deadline it inherited, how it
// learns of cancellation, the autograd context, whether its caller had turned libtorch's grad mode
// off, its caller's autocast, and the streams of devices that are current. Handlers start with that
// of their call; continuations and coroutines keep the one under which they were made, on any
// thread.
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
// Makes an ExecutionContext current on this thread for a block. Blocks nest. Throws std::bad_alloc,
// and leaves the thread as it was, where a context with streams or autocast finds no memory for a
// while.
class ExecutionContextScope {
 public:
  explicit ExecutionContextScope(ExecutionContext context)
      : ExecutionContextScope(std::move(context), nullptr) {}
  // With memory_for() that context, which makes that certain.
  ExecutionContextScope(ExecutionContext context, std::shared_ptr<ScopeMemory> memory)
      : ExecutionContextScope(std::exchange(ExecutionContext::current(), std::move(context)),
                              Exchanged()) {
    if (ExecutionContext::current().streams || ExecutionContext::current().autocast) [[unlikely]]
      enter(std::move(memory));
  }
  ~ExecutionContextScope() {
    if (memory_) [[unlikely]]
      leave();
    if (turned_grad_off_) turn_grad_on();
    ExecutionContext::current() = std::move(outer_);
  }
  ExecutionContextScope(const ExecutionContextScope&) = delete;
  ExecutionContextScope& operator=(const ExecutionContextScope&) = delete;

  // What one scope of that context needs; null if that is nothing.
  [[nodiscard]] static std::shared_ptr<ScopeMemory> memory_for(const ExecutionContext& context);

 private:
  struct Exchanged {};
  // The destructor undoes this if what follows throws.
  ExecutionContextScope(ExecutionContext outer, Exchanged) noexcept
      : outer_(std::move(outer)),
        turned_grad_off_(ExecutionContext::current().no_grad && turn_grad_off()) {}
  void enter(std::shared_ptr<ScopeMemory> memory);
  void leave() noexcept;
  ExecutionContext outer_;
  bool turned_grad_off_;
  std::shared_ptr<ScopeMemory> memory_;  // null where neither streams nor autocast were changed
};

// What runs later, under `context`. Made with all the memory that it needs: once made, it runs,
// also where none is left. Thread contract: any one thread at a time.
class Continuation {
 public:
  Continuation(ExecutionContext context, base::UniqueFunction<void()> task);
  // Runs the task, once: on the thread pool of the context's worker; without one, on that of any
  // worker of this process, so that it may wait; on this thread, before returning, when there is
  // none, or it has stopped, or has no memory for one more. Throws only what the task does there.
  void run() &&;

 private:
  struct Work {
    ExecutionContext context;
    base::UniqueFunction<void()> task;
    std::shared_ptr<ScopeMemory> scope;
  };
  static void perform(Work& work);
  std::unique_ptr<Work> work_;
};

}  // namespace stitch::rpc

namespace stitch {

// Tells the handler running on this thread that its caller has cancelled the call or is lost, or
// that its deadline has passed. A std::stop_callback on it runs on a thread reserved for such
// callbacks, however busy the handlers are; it may wait for futures.
[[nodiscard]] std::stop_token current_stop_token();

}  // namespace stitch
