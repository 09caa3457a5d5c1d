#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stitch/base/hash.h"
#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"
#include "stitch/rref/call_order.h"
#include "stitch/rref/lifetime/rref_id.h"

namespace stitch::rref {

// The owner's end of ordered handles: holds requests back until those made before them through the
// same handle have ended, in whatever order messages arrive. A request has ended when it is
// destroyed: its function has returned (a coroutine: is over), it was refused, or it never left.
// Thread contract: any thread; no lock is held while a request is started.
class OrderedCalls : public std::enable_shared_from_this<OrderedCalls> {
 public:
  using Start = base::UniqueFunction<void()>;
  // Limits for what a caller can make this worker remember: handles, and numbers that ended before
  // their turn. Requests that wait are limited as all requests are (max_inflight_bytes).
  static constexpr std::size_t kMaxStreamsOfACaller = 1 << 20;
  static constexpr std::size_t kMaxEndedEarlyOfACaller = 1 << 20;

  // A request that has arrived. Its number is over when this is destroyed. Moved, not copied.
  class Arrived {
   public:
    Arrived() = default;
    Arrived(Arrived&& other) noexcept = default;
    Arrived& operator=(Arrived&& other) noexcept {
      std::swap(calls_, other.calls_);
      std::swap(caller_, other.caller_);
      std::swap(place_, other.place_);
      return *this;
    }
    ~Arrived();
    [[nodiscard]] bool ordered() const noexcept { return calls_ != nullptr; }
    // Calls `start` when all before it have ended: now, or on the thread that ends the last of
    // them. Immediately if the caller is lost or this worker shuts down. Dropped without being
    // called if this is destroyed before.
    void wait(Start start) const;

   private:
    friend class OrderedCalls;
    std::shared_ptr<OrderedCalls> calls_;
    WorkerLife caller_;
    PlaceInOrder place_;
  };

  // Throws Error(protocol): the number came before, or a limit is exceeded.
  [[nodiscard]] Arrived arrive(const WorkerLife& caller, const PlaceInOrder& place)
      STITCH_EXCLUDES(mutex_);
  // A frame of a caller's CallOrder. Throws Error(protocol).
  void on_frame(const WorkerLife& caller, std::span<const std::byte> frame) STITCH_EXCLUDES(mutex_);
  // What waits is started, and will find that it was cancelled.
  void caller_lost(const WorkerLife& caller) STITCH_EXCLUDES(mutex_);
  // The same for all callers.
  void close() STITCH_EXCLUDES(mutex_);
  // Handles known, and requests that wait.
  struct Counts {
    std::size_t streams = 0, waiting = 0;
  };
  [[nodiscard]] Counts counts() const STITCH_EXCLUDES(mutex_);

 private:
  struct Slot {
    bool ended = false;
    bool early = false;  // ended before its turn
    Start start;         // waits, if not empty
  };
  struct Stream {
    std::uint64_t next = 0;  // all before have ended
    std::optional<std::uint64_t> total;
    bool starting = false;                // a thread is in start_due()
    std::map<std::uint64_t, Slot> slots;  // from `next` on
  };
  struct Key {
    WorkerLife caller;
    std::uint64_t stream = 0;
    friend bool operator==(const Key&, const Key&) = default;
  };
  struct KeyHash {
    std::size_t operator()(const Key& key) const noexcept {
      return base::hash_of(key.caller.epoch, key.caller.id, key.stream);
    }
  };
  struct Caller {
    std::size_t streams = 0;
    std::size_t ended_early = 0;
  };
  using Streams = std::unordered_map<Key, Stream, KeyHash>;

  [[nodiscard]] Stream& stream(const Key& key) STITCH_REQUIRES(mutex_);
  void end(const Key& key, std::uint64_t number) noexcept STITCH_EXCLUDES(mutex_);
  void start_due(const Key& key) STITCH_REQUIRES(mutex_);
  [[nodiscard]] static std::vector<Start> take_waiting(Stream& stream);

  mutable base::Mutex mutex_;
  bool closed_ STITCH_GUARDED_BY(mutex_) = false;
  Streams streams_ STITCH_GUARDED_BY(mutex_);
  std::map<WorkerLife, Caller> callers_ STITCH_GUARDED_BY(mutex_);
  std::set<WorkerLife> lost_ STITCH_GUARDED_BY(mutex_);  // their late requests do not wait
};

}  // namespace stitch::rref
