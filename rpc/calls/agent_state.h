#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "stitch/base/error.h"
#include "stitch/base/event_ring.h"
#include "stitch/base/forked.h"
#include "stitch/base/mutex.h"
#include "stitch/rpc/message/worker_info.h"

namespace stitch::rpc {

// Whether a worker still runs:
//
//   running --begin_shutdown()--> shutting down --stop()--> stopped --end()--> ended
//
// While it shuts down, only its handlers, continuations and callbacks may begin something new. An
// agent inherited through fork() is unusable in the child. Part of its Agent. Thread contract: any
// thread.
class AgentState {
 public:
  // Keeps a reference to `self`.
  explicit AgentState(const WorkerInfo& self) noexcept : self_(self) {}

  // The agent belongs to the process that this one was forked from.
  [[nodiscard]] bool forked() const noexcept { return fork_ != base::fork_count(); }
  [[nodiscard]] bool stopped() const noexcept {
    return stopped_.load(std::memory_order_acquire) || forked();
  }
  [[nodiscard]] bool ended() const STITCH_EXCLUDES(mutex_);
  // Throws `shutting_down` when the worker has stopped, and from begin_shutdown() on when this
  // thread runs no handler, continuation or callback; after fence() its error. Throws
  // `invalid_argument` in a forked child.
  void throw_if_stopped() const STITCH_EXCLUDES(mutex_);

  // This worker was declared dead: from now on throw_if_stopped() throws `error`.
  void fence(const Error& error) STITCH_EXCLUDES(mutex_);
  // Whether it was, also once it has stopped.
  [[nodiscard]] bool fenced() const STITCH_EXCLUDES(mutex_);
  // True for the first caller.
  [[nodiscard]] bool begin_shutdown() STITCH_EXCLUDES(mutex_);
  // Waits for end(). False where that has not come by the deadline.
  [[nodiscard]] bool await_end(std::chrono::steady_clock::time_point deadline) const
      STITCH_EXCLUDES(mutex_);
  void stop() noexcept { stopped_.store(true, std::memory_order_release); }
  void end() STITCH_EXCLUDES(mutex_);
  // This worker leaves while others go on: from now on it begins none of their requests.
  void refuse_requests() noexcept { refusing_.store(true, std::memory_order_release); }
  [[nodiscard]] bool refuses_requests() const noexcept {
    return refusing_.load(std::memory_order_acquire);
  }

  // What the worker has done last; any part of it records there.
  [[nodiscard]] base::EventRing& events() const noexcept { return *events_; }
  // The same, for what may outlive the worker.
  [[nodiscard]] const std::shared_ptr<base::EventRing>& shared_events() const noexcept {
    return events_;
  }

 private:
  const WorkerInfo& self_;
  const std::shared_ptr<base::EventRing> events_ = std::make_shared<base::EventRing>();
  const std::uint32_t fork_ = base::fork_count();
  std::atomic<bool> restricted_{false};     // shutting down or fenced
  std::atomic<bool> shutting_down_{false};  // set under mutex_, as the next
  std::optional<Error> fenced_ STITCH_GUARDED_BY(mutex_);
  std::atomic<bool> stopped_{false};
  std::atomic<bool> refusing_{false};
  mutable base::Mutex mutex_;
  mutable base::CondVar ended_changed_;
  bool ended_ STITCH_GUARDED_BY(mutex_) = false;
};

}  // namespace stitch::rpc
