#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <stop_token>

#include "stitch/base/mutex.h"
#include "stitch/rpc/future/future_state.h"
#include "stitch/rpc/future/runtime.h"

namespace stitch::rpc {

// Whether a served call or a coroutine was asked to stop, and what stops with it: its stop token,
// and the future that it waits for. The std::stop_source behind it is made when its token is first
// taken: most calls are never cancelled and never look. Shared. Thread contract: any thread.
class StopFlag {
 public:
  // That of a served call.
  StopFlag() : call_(this) {}
  // That of a coroutine, made under `outer` (may be null).
  explicit StopFlag(const StopFlag* outer) : call_(outer == nullptr ? nullptr : outer->call_) {}

  // Sets the token, and then adds the awaited future to `more`: code that learns of the stop by
  // either finds the token set. Where a token was taken, both are done on a thread of `runtime` for
  // stop callbacks; on this one where that is null. Without `with_work` only the token is set.
  void request(const std::shared_ptr<Runtime>& runtime, detail::ToStop& more, bool with_work = true)
      STITCH_EXCLUDES(mutex_);
  [[nodiscard]] bool requested() const noexcept {
    return requested_.load(std::memory_order_acquire);
  }
  [[nodiscard]] std::stop_token token() STITCH_EXCLUDES(mutex_);

  // From now on a stop goes on to `state`. True: a stop has come before that, and has to go on.
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

}  // namespace stitch::rpc
