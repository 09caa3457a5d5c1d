#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/base/recycler.h"
#include "stitch/rpc/calls/deadline_heap.h"
#include "stitch/rpc/calls/pending_call.h"
#include "stitch/rpc/message/message.h"
#include "stitch/rpc/peers/duration_text.h"
#include "stitch/rpc/peers/peer_budget.h"

namespace stitch::rpc {

// A call that this worker has made and that is not completed.
struct OutstandingCall {
  using Clock = std::chrono::steady_clock;
  std::shared_ptr<PendingCall> pending;
  const WorkerInfo* to = nullptr;  // the peer table's
  std::string_view function;       // the registry's
  std::chrono::nanoseconds timeout{0};
  Clock::time_point deadline = Clock::time_point::max();
  PeerBudget* budget = nullptr;  // of `to`
  Room room{};                   // none while it waits there
  std::uint64_t id = 0;          // set by CallTable::add()
  bool begun = false;            // it has been passed to the transport
  Clock::time_point made{};
  const void* under = nullptr;  // StopFlag::call() of the call whose handler made it; compared only
  // Set by note_queued() and note_sent(); neither for a request that was written immediately.
  bool queued = false;
  std::optional<Clock::time_point> sent{};
  // The callee answers at the deadline, and says where the call is: so long is waited for that.
  static constexpr std::chrono::milliseconds kLastAnswer{20};
  // When take_expired() takes it.
  [[nodiscard]] Clock::time_point expires() const noexcept {
    return std::min(deadline, Clock::time_point::max() - kLastAnswer) + kLastAnswer;
  }
  std::size_t heap_place = DeadlineHeap<OutstandingCall>::kNowhere;  // the table's
};

// The outstanding calls of one worker. Removing a call from the table gives the right, and the
// duty, to complete it. Thread contract: any thread.
class CallTable {
 public:
  using Clock = OutstandingCall::Clock;
  // Returns the call's id, never 0. When it expires() take_expired() is to be called.
  std::uint64_t add(OutstandingCall&& call) STITCH_EXCLUDES(mutex_);
  // max() for none; nothing if the call is not outstanding.
  [[nodiscard]] std::optional<Clock::time_point> deadline(std::uint64_t id) const
      STITCH_EXCLUDES(mutex_);
  // Another id of the same kind.
  [[nodiscard]] std::uint64_t new_id() STITCH_EXCLUDES(mutex_);
  // A call that has waited for room has it from now on. False, and the room is given back, when it
  // is not outstanding any more.
  [[nodiscard]] bool give_room(std::uint64_t id, Room room) STITCH_EXCLUDES(mutex_);
  // A call that has waited for the window is about to be sent. False when it is not outstanding any
  // more.
  [[nodiscard]] bool begin(std::uint64_t id) STITCH_EXCLUDES(mutex_);
  // The request was not written immediately; it has been written now. Calls that have completed are
  // ignored.
  void note_queued(std::uint64_t id) STITCH_EXCLUDES(mutex_);
  void note_sent(std::uint64_t id, Clock::time_point when) STITCH_EXCLUDES(mutex_);
  // Removes a call.
  [[nodiscard]] std::optional<OutstandingCall> take(std::uint64_t id) STITCH_EXCLUDES(mutex_);
  // The same for an answer: only the worker that was called may answer.
  [[nodiscard]] std::optional<OutstandingCall> take(std::uint64_t id, const WorkerInfo& from)
      STITCH_EXCLUDES(mutex_);
  // What waits for an answer from `from`; null if the call is not outstanding.
  [[nodiscard]] std::shared_ptr<PendingCall> find(std::uint64_t id, const WorkerInfo& from) const
      STITCH_EXCLUDES(mutex_);
  // Removes all calls, or all to one worker.
  [[nodiscard]] std::vector<OutstandingCall> take_all(const WorkerInfo* to) noexcept
      STITCH_EXCLUDES(mutex_);
  // Copies of all, without what waits for their outcomes.
  [[nodiscard]] std::vector<OutstandingCall> list() const STITCH_EXCLUDES(mutex_);
  // Removes those that have expired. `next` is when to call this again, max() for never.
  struct Expired {
    std::vector<OutstandingCall> calls;
    Clock::time_point next = Clock::time_point::max();
  };
  [[nodiscard]] Expired take_expired(Clock::time_point now) noexcept STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t size() const noexcept { return size_.load(std::memory_order_relaxed); }

 private:
  using Calls =
      std::unordered_map<std::uint64_t, OutstandingCall, std::hash<std::uint64_t>, std::equal_to<>,
                         base::RecyclingAllocator<std::pair<const std::uint64_t, OutstandingCall>>>;
  [[nodiscard]] OutstandingCall extract(Calls::iterator at) noexcept STITCH_REQUIRES(mutex_);

  mutable base::Mutex mutex_;
  std::atomic<std::size_t> size_{0};  // of calls_
  std::uint64_t next_ STITCH_GUARDED_BY(mutex_) = 1;
  Calls calls_ STITCH_GUARDED_BY(mutex_);
  DeadlineHeap<OutstandingCall> deadlines_ STITCH_GUARDED_BY(mutex_);  // of calls_
};

// The error of a call that ended with `cause`: "call f() to worker "ps0" (id 7)" and `text`.
[[nodiscard]] Error about(const OutstandingCall& call, const Error& cause, const std::string& text);

// "timed out after 5000 ms; ".
[[nodiscard]] std::string timed_out_after(const OutstandingCall& call);

// Completes a call that is in no table any more. What its callbacks throw is theirs.
void complete_with_error(const OutstandingCall& call, const Error& error) noexcept;

}  // namespace stitch::rpc
