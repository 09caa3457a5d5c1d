#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stitch/rpc/message.h"
#include "stitch/transport/event_loop.h"
#include "stitch/transport/mutex.h"

namespace stitch {

class IncomingCall;

// Someone waiting for the outcome of a call. Exactly one of the two is called, once, on a reader thread, the timer thread or
// the thread that made the call; it must not block.
class PendingCall {
 public:
  virtual ~PendingCall() = default;
  // The reply; its tensors have been decoded. May throw: the error goes to on_error.
  virtual void on_reply(InMessage& message) = 0;
  virtual void on_error(const Error& error) = 0;
};

// The calls this worker has made and that are not answered. Thread contract: any thread.
class CallTable {
 public:
  struct Record {
    std::shared_ptr<PendingCall> pending;
    WorkerInfo to;
    std::string function;
    std::chrono::nanoseconds timeout{0};
    std::chrono::steady_clock::time_point started;
    transport::EventLoop::TimerId timer = 0;
  };

  // Returns the new call's id, never 0.
  std::uint64_t add(Record record) STITCH_EXCLUDES(mutex_);
  // Remembers the call's timer; false when the call has completed already.
  bool set_timer(std::uint64_t id, transport::EventLoop::TimerId timer) STITCH_EXCLUDES(mutex_);
  // Removes a call: whoever gets the record completes it.
  [[nodiscard]] std::optional<Record> take(std::uint64_t id) STITCH_EXCLUDES(mutex_);
  // The same, only if it was made to `from`: nobody else can answer it.
  [[nodiscard]] std::optional<Record> take(std::uint64_t id, const WorkerInfo& from) STITCH_EXCLUDES(mutex_);
  // Removes all calls, or all to one worker.
  [[nodiscard]] std::vector<Record> take_all() STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::vector<Record> take_all(const WorkerInfo& to) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t size() const STITCH_EXCLUDES(mutex_);

 private:
  mutable Mutex mutex_;
  std::uint64_t next_ STITCH_GUARDED_BY(mutex_) = 1;
  std::unordered_map<std::uint64_t, Record> records_ STITCH_GUARDED_BY(mutex_);
};

// The calls of others that this worker is serving. Thread contract: any thread.
class IncomingTable {
 public:
  void add(const std::shared_ptr<IncomingCall>& call) STITCH_EXCLUDES(mutex_);
  void remove(const IncomingCall& call) STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::shared_ptr<IncomingCall> find(WorkerId caller, std::uint64_t call_id) const STITCH_EXCLUDES(mutex_);
  // Those of one caller, or all.
  [[nodiscard]] std::vector<std::shared_ptr<IncomingCall>> list(std::optional<WorkerId> caller) const STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t size() const STITCH_EXCLUDES(mutex_);

 private:
  mutable Mutex mutex_;
  // One-way calls have no id; they are told apart by address.
  std::map<std::pair<WorkerId, std::uint64_t>, std::weak_ptr<IncomingCall>> calls_ STITCH_GUARDED_BY(mutex_);
  std::unordered_map<const IncomingCall*, std::weak_ptr<IncomingCall>> one_way_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch
