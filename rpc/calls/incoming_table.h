#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stitch/base/hash.h"
#include "stitch/base/mutex.h"
#include "stitch/base/recycler.h"
#include "stitch/rpc/calls/deadline_heap.h"
#include "stitch/rpc/message/worker_info.h"

namespace stitch::rpc {

class IncomingCall;

// The calls of peers that one worker is serving. It owns none of them: a call leaves the table when
// it is destroyed. Thread contract: any thread.
class IncomingTable {
 public:
  using Clock = std::chrono::steady_clock;
  // `cancelled`: added, but its caller has cancelled it already. `duplicate`: not added, its caller
  // has another call with that id here.
  enum class Added : std::uint8_t { serve, cancelled, duplicate };
  [[nodiscard]] Added add(const std::shared_ptr<IncomingCall>& call) STITCH_EXCLUDES(mutex_);
  // Does nothing for a call that was not added.
  void remove(const IncomingCall& call) STITCH_EXCLUDES(mutex_);
  // The call that its caller cancels. Null when it is not here: it is over, or the CANCEL has
  // overtaken the request, so it is remembered: the last kEarlyCancels of each caller.
  [[nodiscard]] std::shared_ptr<IncomingCall> cancel(const WorkerInfo& caller,
                                                     std::uint64_t call_id) STITCH_EXCLUDES(mutex_);
  static constexpr std::size_t kEarlyCancels = 256;
  // That life of a caller is lost: it sends no request any more.
  void forget_cancels(const WorkerInfo& caller) STITCH_EXCLUDES(mutex_);
  // Those whose deadline has passed, each once; they stay in the table. `next` is when to call this
  // again, max() for never.
  struct Expired {
    std::vector<std::shared_ptr<IncomingCall>> calls;
    Clock::time_point next = Clock::time_point::max();
  };
  [[nodiscard]] Expired expired(Clock::time_point now) noexcept STITCH_EXCLUDES(mutex_);
  // One call; null when it is not here.
  [[nodiscard]] std::shared_ptr<IncomingCall> find(const WorkerInfo& caller,
                                                   std::uint64_t call_id) const
      STITCH_EXCLUDES(mutex_);
  // Those of one life of a caller, or all.
  [[nodiscard]] std::vector<std::shared_ptr<IncomingCall>> list(
      const std::optional<WorkerInfo>& caller) const noexcept STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t size() const STITCH_EXCLUDES(mutex_);

 private:
  struct Key {
    WorkerId caller;
    std::uint64_t epoch = 0;  // each life of the caller counts its calls from 1
    std::uint64_t id = 0;
    friend bool operator==(const Key&, const Key&) = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const noexcept {
      return base::hash_of(key.id, key.caller.value(), key.epoch);
    }
  };
  struct TrackedCall {
    const IncomingCall* address = nullptr;
    std::weak_ptr<IncomingCall> call;
    std::size_t heap_place = DeadlineHeap<TrackedCall>::kNowhere;
  };
  // The ids of cancelled calls that were not here; the oldest is overwritten first.
  struct EarlyCancels {
    std::array<std::uint64_t, kEarlyCancels> ids{};
    std::size_t next = 0;
    std::uint64_t highest = 0;
    std::uint64_t epoch = 0;
  };
  [[nodiscard]] bool cancelled_early(const Key& key) const STITCH_REQUIRES(mutex_);

  mutable base::Mutex mutex_;
  // One-way calls have no id; their address identifies them.
  std::unordered_map<Key, TrackedCall, Hash, std::equal_to<>,
                     base::RecyclingAllocator<std::pair<const Key, TrackedCall>>>
      calls_ STITCH_GUARDED_BY(mutex_);
  std::unordered_map<const IncomingCall*, TrackedCall, std::hash<const IncomingCall*>,
                     std::equal_to<>,
                     base::RecyclingAllocator<std::pair<const IncomingCall* const, TrackedCall>>>
      one_way_ STITCH_GUARDED_BY(mutex_);
  DeadlineHeap<TrackedCall> deadlines_ STITCH_GUARDED_BY(mutex_);  // of both
  std::unordered_map<WorkerId, EarlyCancels> early_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::rpc
