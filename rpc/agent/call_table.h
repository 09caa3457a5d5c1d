#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/base/recycler.h"
#include "stitch/rpc/agent/call_path.h"
#include "stitch/rpc/agent/deadline_heap.h"
#include "stitch/rpc/agent/duration_text.h"
#include "stitch/rpc/agent/peer_flow.h"
#include "stitch/rpc/message/message.h"

namespace stitch::rpc {

// A call that this worker has made and that is not completed.
struct OutstandingCall {
  using Clock = std::chrono::steady_clock;
  std::shared_ptr<PendingCall> pending;
  const WorkerInfo* to = nullptr;  // the peer table's
  std::string_view function;       // the registry's
  std::chrono::nanoseconds timeout{0};
  Clock::time_point deadline = Clock::time_point::max();
  PeerFlow* flow = nullptr;  // of `to`
  FlowShare share{};         // none: it waits there
  std::uint64_t id = 0;      // set by CallTable::add()
  bool begun = false;        // once it has left the tables: it had a share
  Clock::time_point made{};
  const void* under = nullptr;  // StopFlag::call() of the call whose handler made it; compared only
  // Set by note_queued() and note_sent(); neither for a request that was written immediately.
  bool queued = false;
  bool inside = false;  // as in PeerFlow, and it may be held up there
  std::optional<Clock::time_point> sent{};
  Clock::time_point waited_until{};  // in its flow, when it began there; the epoch: did not wait
  bool asked = false;                // before the deadline, and not answered yet
  // What its callee has said about it then; null: nothing.
  std::unique_ptr<std::string> answered{};
  // A call with a shorter timeout than this is asked about before its deadline, when a quarter of
  // the timeout is left: the answer is to be there in time.
  static constexpr std::chrono::milliseconds kAskedLate{250};
  // When take_expired() has to look at it first.
  [[nodiscard]] Clock::time_point first_look() const noexcept {
    return timeout < kAskedLate ? deadline - timeout / 4 : deadline;
  }
  std::size_t heap_place = DeadlineHeap<OutstandingCall>::kNowhere;  // the table's
};

// The outstanding calls of one worker. Removing a call from the table gives the right, and the
// duty, to complete it. Thread contract: any thread.
class CallTable {
 public:
  using Clock = OutstandingCall::Clock;
  // An empty table of no buckets would grow inside add(), after it has taken the call.
  CallTable() { calls_.reserve(1); }
  // Returns the call's id, never 0. At its first_look() take_expired() is to be called. If it
  // throws, `call` is what it was.
  std::uint64_t add(OutstandingCall&& call) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] bool contains(std::uint64_t id) const STITCH_EXCLUDES(mutex_);
  // max() for none; nothing if the call is not outstanding.
  [[nodiscard]] std::optional<Clock::time_point> deadline(std::uint64_t id) const
      STITCH_EXCLUDES(mutex_);
  // Another id of the same kind.
  [[nodiscard]] std::uint64_t new_id() STITCH_EXCLUDES(mutex_);
  // A call that has waited is about to be sent, and has a share of its flow from now on. False, and
  // it has not, when it is not outstanding any more.
  [[nodiscard]] bool begin(std::uint64_t id, const PeerFlow::Size& size) STITCH_EXCLUDES(mutex_);
  // The request was not written immediately; it has been written now. Calls that have completed are
  // ignored.
  void note_queued(std::uint64_t id) STITCH_EXCLUDES(mutex_);
  void note_sent(std::uint64_t id, Clock::time_point when) STITCH_EXCLUDES(mutex_);
  // Removes a call.
  [[nodiscard]] std::optional<OutstandingCall> take(std::uint64_t id) STITCH_EXCLUDES(mutex_);
  // The same for an answer: only the worker that was called may answer.
  [[nodiscard]] std::optional<OutstandingCall> take(std::uint64_t id, const WorkerInfo& from)
      STITCH_EXCLUDES(mutex_);
  // The same for an answer that is an error. A call whose deadline has passed stays for
  // take_expired(): what its function called has the same deadline, and may have noticed it first.
  [[nodiscard]] std::optional<OutstandingCall> take_failed(std::uint64_t id, const WorkerInfo& from,
                                                           Clock::time_point now)
      STITCH_EXCLUDES(mutex_);
  // What waits for an answer from `from`; null if the call is not outstanding.
  [[nodiscard]] std::shared_ptr<PendingCall> find(std::uint64_t id, const WorkerInfo& from) const
      STITCH_EXCLUDES(mutex_);
  // Removes all calls, or all to one worker, calls `first` and passes each to `end`, without the
  // lock. Where there is no memory for a list of them, they are found one by one after that.
  template <class First, class End>
  void end_all(const WorkerInfo* to, First&& first, End&& end) STITCH_EXCLUDES(mutex_) {
    std::vector<OutstandingCall> taken;
    bool listed = true;
    try {
      taken = take_all(to);
    } catch (const std::bad_alloc&) {
      listed = false;
    }
    first();
    for (OutstandingCall& call : taken) end(std::move(call));
    while (!listed) {
      auto call = take_any(to);
      if (!call) return;
      end(std::move(*call));
    }
  }
  // Copies of all, without what waits for their outcomes.
  [[nodiscard]] std::vector<OutstandingCall> list() const STITCH_EXCLUDES(mutex_);
  // Removes those whose deadline has passed, or as many as there is memory for. `to_ask`: others,
  // sent, of which their callees are to be asked now, each named once; at most kMaxToAsk. `next` is
  // when to call this again, max() for never.
  static constexpr std::size_t kMaxToAsk = 16;
  struct Expired {
    std::vector<OutstandingCall> calls;
    std::array<std::pair<std::uint64_t, const WorkerInfo*>, kMaxToAsk> to_ask{};
    std::size_t asked = 0;  // of to_ask
    Clock::time_point next = Clock::time_point::max();
  };
  [[nodiscard]] Expired take_expired(Clock::time_point now) STITCH_EXCLUDES(mutex_);
  // What `from` has said about a call; ignored if that is not outstanding, or take_expired() has
  // not named it in to_ask since the last answer.
  void note_answered(std::uint64_t id, const WorkerInfo& from, std::unique_ptr<std::string> what)
      STITCH_EXCLUDES(mutex_);
  [[nodiscard]] Clock::time_point first_deadline() const STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t size() const noexcept { return size_.load(std::memory_order_relaxed); }

 private:
  using Calls =
      std::unordered_map<std::uint64_t, OutstandingCall, std::hash<std::uint64_t>, std::equal_to<>,
                         base::RecyclingAllocator<std::pair<const std::uint64_t, OutstandingCall>>>;
  [[nodiscard]] OutstandingCall extract(Calls::iterator at) STITCH_REQUIRES(mutex_);
  [[nodiscard]] std::vector<OutstandingCall> take_all(const WorkerInfo* to) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::optional<OutstandingCall> take_any(const WorkerInfo* to)
      STITCH_EXCLUDES(mutex_);

  mutable base::Mutex mutex_;
  std::atomic<std::size_t> size_{0};  // of calls_
  std::uint64_t next_ STITCH_GUARDED_BY(mutex_) = 1;
  Calls calls_ STITCH_GUARDED_BY(mutex_);
  DeadlineHeap<OutstandingCall> deadlines_ STITCH_GUARDED_BY(mutex_);  // of calls_
};

// The error of a call that ended with `cause`: "call f() to worker "ps0" (id 7)" and `text`.
[[nodiscard]] Error about(const OutstandingCall& call, const Error& cause, const std::string& text);

// Completes one of several calls with the error that `make` returns. If making or reporting it
// throws, the remaining calls are still completed.
template <class Make>
void complete_with_error(const OutstandingCall& call, Make make) noexcept {
  const auto error = [&]() noexcept -> std::optional<Error> {
    try {
      return make();
    } catch (...) {
      return std::nullopt;
    }
  }();
  try {
    call.pending->on_error(error ? *error : Error(ErrorCode::overloaded, "out of memory"));
  } catch (...) {
    // Out of memory while reporting that.
  }
}

}  // namespace stitch::rpc
