#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stitch/rpc/message.h"
#include "stitch/transport/mutex.h"
#include "stitch/transport/recycler.h"

namespace stitch {

class IncomingCall;

// Someone waiting for the outcome of a call. Exactly one of the two is called, once, on a reader
// thread, the timer thread or the thread that made the call; it must not block.
class PendingCall {
 public:
  virtual ~PendingCall() = default;
  // The reply; its tensors have been decoded. May throw: the error goes to on_error.
  virtual void on_reply(InMessage& message) = 0;
  virtual void on_error(const Error& error) = 0;
  // Where `bytes` bytes of the reply's tensors shall lie; without data for anywhere. On a reader
  // thread, before on_reply().
  [[nodiscard]] virtual transport::Buffer place(std::size_t bytes) noexcept { return {}; }
};

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
  };
  struct Added {
    std::uint64_t id = 0;  // never 0
    bool watch = false;  // its deadline comes before all that are watched for: take_expired() is to
                         // be called then
  };
  Added add(Record record) STITCH_EXCLUDES(mutex_);
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
  // May come up to a millisecond late, later with very many calls.
  struct Expired {
    std::vector<std::pair<std::uint64_t, Record>> records;
    Clock::time_point next = Clock::time_point::max();
  };
  [[nodiscard]] Expired take_expired(Clock::time_point now) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t size() const noexcept { return size_.load(std::memory_order_relaxed); }

 private:
  using Records =
      std::unordered_map<std::uint64_t, Record, std::hash<std::uint64_t>, std::equal_to<>,
                         transport::RecyclingAllocator<std::pair<const std::uint64_t, Record>>>;
  [[nodiscard]] Record extract(Records::iterator at) STITCH_REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::atomic<std::size_t> size_{0};  // of records_
  std::uint64_t next_ STITCH_GUARDED_BY(mutex_) = 1;
  Records records_ STITCH_GUARDED_BY(mutex_);
  Clock::time_point watched_ STITCH_GUARDED_BY(mutex_) =
      Clock::time_point::max();  // take_expired() will be called then
};

// The calls of others that this worker is serving. Thread contract: any thread.
class IncomingTable {
 public:
  void add(const std::shared_ptr<IncomingCall>& call) STITCH_EXCLUDES(mutex_);
  void remove(const IncomingCall& call) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::shared_ptr<IncomingCall> find(WorkerId caller, std::uint64_t call_id) const
      STITCH_EXCLUDES(mutex_);
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
  using Weak = std::weak_ptr<IncomingCall>;
  mutable Mutex mutex_;
  // One-way calls have no id; they are told apart by address.
  std::unordered_map<Key, Weak, Hash, std::equal_to<>,
                     transport::RecyclingAllocator<std::pair<const Key, Weak>>>
      calls_ STITCH_GUARDED_BY(mutex_);
  std::unordered_map<const IncomingCall*, Weak, std::hash<const IncomingCall*>, std::equal_to<>,
                     transport::RecyclingAllocator<std::pair<const IncomingCall* const, Weak>>>
      one_way_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch
