#pragma once

#include <array>
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
#include "stitch/rpc/agent/call_path.h"
#include "stitch/rpc/agent/deadline_heap.h"
#include "stitch/rpc/message/message.h"

namespace stitch::rpc {

class IncomingCall;

// The calls this worker has made and that are not answered. Thread contract: any thread.
class CallTable {
 public:
  using Clock = std::chrono::steady_clock;
  struct Record {
    std::shared_ptr<PendingCall> pending;
    const WorkerInfo* to = nullptr;  // the peer table's
    std::string_view function;       // the registry's
    std::chrono::nanoseconds timeout{0};
    Clock::time_point deadline = Clock::time_point::max();
    std::uint64_t id = 0;  // set by add()
    // Set by note_queued() and note_sent(): neither for a request that was written at once.
    bool queued = false;
    std::optional<Clock::time_point> sent{};
    std::size_t heap_place = DeadlineHeap<Record>::kNowhere;  // the table's
  };
  // Returns the call's id, never 0. At its deadline take_expired() is to be called.
  std::uint64_t add(Record record) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] bool contains(std::uint64_t id) const STITCH_EXCLUDES(mutex_);
  // The request was not written at once; the request has been written.
  void note_queued(std::uint64_t id) STITCH_EXCLUDES(mutex_);
  void note_sent(std::uint64_t id, Clock::time_point when) STITCH_EXCLUDES(mutex_);
  // Removes a call: whoever gets the record completes it.
  [[nodiscard]] std::optional<Record> take(std::uint64_t id) STITCH_EXCLUDES(mutex_);
  // The same, only if it was made to `from`: nobody else can answer it.
  [[nodiscard]] std::optional<Record> take(std::uint64_t id, const WorkerInfo& from)
      STITCH_EXCLUDES(mutex_);
  // Who waits for an answer from `from`; null when nobody does.
  [[nodiscard]] std::shared_ptr<PendingCall> find(std::uint64_t id, const WorkerInfo& from) const
      STITCH_EXCLUDES(mutex_);
  // Removes all calls, or all to one worker.
  [[nodiscard]] std::vector<Record> take_all() STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::vector<Record> take_all(const WorkerInfo& to) STITCH_EXCLUDES(mutex_);
  // Removes those whose deadline has passed. `next` is when to call this again, max() for never.
  struct Expired {
    std::vector<Record> records;
    Clock::time_point next = Clock::time_point::max();
  };
  [[nodiscard]] Expired take_expired(Clock::time_point now) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t size() const noexcept { return size_.load(std::memory_order_relaxed); }

 private:
  using Records =
      std::unordered_map<std::uint64_t, Record, std::hash<std::uint64_t>, std::equal_to<>,
                         base::RecyclingAllocator<std::pair<const std::uint64_t, Record>>>;
  [[nodiscard]] Record extract(Records::iterator at) STITCH_REQUIRES(mutex_);

  mutable base::Mutex mutex_;
  std::atomic<std::size_t> size_{0};  // of records_
  std::uint64_t next_ STITCH_GUARDED_BY(mutex_) = 1;
  Records records_ STITCH_GUARDED_BY(mutex_);
  DeadlineHeap<Record> deadlines_ STITCH_GUARDED_BY(mutex_);  // of those in records_ that have one
};

// The error of a call that ended with `cause`: "call f() to worker "ps0" (id 7)" and `text`.
[[nodiscard]] Error about(const CallTable::Record& record, const Error& cause,
                          const std::string& text);

// The calls of others that this worker is serving. Thread contract: any thread.
class IncomingTable {
 public:
  enum class Added : std::uint8_t { serve, cancelled, duplicate };
  // Says whether its caller has cancelled it already, or has another call of that id here: then it
  // is not added.
  [[nodiscard]] Added add(const std::shared_ptr<IncomingCall>& call) STITCH_EXCLUDES(mutex_);
  // Does nothing for a call that was not added.
  void remove(const IncomingCall& call) STITCH_EXCLUDES(mutex_);
  // The call that its caller cancels. Null when it is not here: then it is over, or has been
  // overtaken by the word that cancels it, and that is remembered. Of each caller the last
  // kEarlyCancels of these are.
  [[nodiscard]] std::shared_ptr<IncomingCall> cancel(WorkerId caller, std::uint64_t call_id)
      STITCH_EXCLUDES(mutex_);
  static constexpr std::size_t kEarlyCancels = 256;
  // Those whose deadline has passed, each once; they stay in the table. `next` is when to call this
  // again, max() for never.
  struct Expired {
    std::vector<std::shared_ptr<IncomingCall>> calls;
    std::chrono::steady_clock::time_point next = std::chrono::steady_clock::time_point::max();
  };
  [[nodiscard]] Expired expired(std::chrono::steady_clock::time_point now) STITCH_EXCLUDES(mutex_);
  // Those of one caller, or all.
  [[nodiscard]] std::vector<std::shared_ptr<IncomingCall>> list(
      std::optional<WorkerId> caller) const STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t size() const STITCH_EXCLUDES(mutex_);

 private:
  struct Key {
    WorkerId caller;
    std::uint64_t id = 0;
    friend bool operator==(const Key&, const Key&) = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const noexcept {
      return std::hash<std::uint64_t>()(key.id * 0x9e3779b97f4a7c15U + key.caller.value());
    }
  };
  struct Entry {
    const IncomingCall* at = nullptr;
    std::weak_ptr<IncomingCall> call;
    std::size_t heap_place = DeadlineHeap<Entry>::kNowhere;
  };
  // The ids of calls that were cancelled and were not here, the oldest overwritten first.
  struct EarlyCancels {
    std::array<std::uint64_t, kEarlyCancels> ids{};
    std::size_t next = 0;
    std::uint64_t highest = 0;
  };
  [[nodiscard]] bool cancelled_early(const Key& key) const STITCH_REQUIRES(mutex_);

  mutable base::Mutex mutex_;
  // One-way calls have no id; they are told apart by address.
  std::unordered_map<Key, Entry, Hash, std::equal_to<>,
                     base::RecyclingAllocator<std::pair<const Key, Entry>>>
      calls_ STITCH_GUARDED_BY(mutex_);
  std::unordered_map<const IncomingCall*, Entry, std::hash<const IncomingCall*>, std::equal_to<>,
                     base::RecyclingAllocator<std::pair<const IncomingCall* const, Entry>>>
      one_way_ STITCH_GUARDED_BY(mutex_);
  DeadlineHeap<Entry> deadlines_ STITCH_GUARDED_BY(mutex_);  // of those above
  std::unordered_map<WorkerId, EarlyCancels> early_ STITCH_GUARDED_BY(mutex_);
};

// Completes one of several calls with the error that `make` gives, or with why there is none: an
// exception must not keep the others from theirs.
template <class Make>
void complete_with_error(const CallTable::Record& record, Make make) noexcept {
  const auto error = [&]() noexcept -> std::optional<Error> {
    try {
      return make();
    } catch (...) {
      return std::nullopt;
    }
  }();
  try {
    record.pending->on_error(error ? *error : Error(ErrorCode::overloaded, "out of memory"));
  } catch (...) {
    // No memory to tell it either: the others may have more luck.
  }
}

// "4.9 s", "120 ms".
[[nodiscard]] std::string duration_text(std::chrono::nanoseconds duration);

}  // namespace stitch::rpc
