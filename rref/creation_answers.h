#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/base/reserve.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rref/lifetime/rref_id.h"
#include "stitch/rref/single_timer.h"

namespace stitch::rref {

// Answers "your object has been created" that are sent together: a number each, in a section of the
// next small message to that peer, or in a frame of their own. For the caller each is what a reply
// without a result is. Shared with its timer, which may run after its owner is gone. Thread
// contract: any thread; its lock is never held across a call to the agent.
class CreationAnswers : public std::enable_shared_from_this<CreationAnswers> {
 public:
  // So many wait at most.
  static constexpr std::size_t kMaxTogether = 128;
  // A larger message takes none along: they would wait for it.
  static constexpr std::size_t kMaxBytes = std::size_t{32} << 10;

  explicit CreationAnswers(rpc::Agent& agent) : agent_(&agent) {}

  // The call `id` of that worker, to create an object here, has succeeded. The answer is sent when
  // flush() is called; `later`: also within a millisecond without that. Out of memory throws, and
  // the answer is not kept; what is kept and cannot be sent waits again, in the reserve.
  void add(const WorkerInfo& caller, std::uint64_t id, bool later) STITCH_EXCLUDES(mutex_);
  // Whether some wait for messages to that worker.
  [[nodiscard]] bool any(const WorkerInfo& caller) const STITCH_EXCLUDES(mutex_);
  // Sends those to this worker now.
  void flush(const WorkerInfo& caller) STITCH_EXCLUDES(mutex_);
  // Writes them into a message that is about to leave. If it does not, they wait again. Out of
  // memory throws, and they wait as before.
  void ride(rpc::OutMessage& message, const WorkerInfo& to) STITCH_EXCLUDES(mutex_);
  // How many wait, or are just being sent: their callers wait for them.
  [[nodiscard]] std::size_t waiting() const noexcept { return waiting_.load(); }
  // Nothing is sent afterwards.
  void stop() STITCH_EXCLUDES(mutex_);

  // Answers have arrived: completes these calls of this worker. Throws Error(protocol) if they are
  // malformed.
  static void accept(rpc::Agent& agent, const WorkerInfo& from, std::span<const std::byte> bytes);

 private:
  using Calls = std::vector<std::uint64_t, base::ReservedAllocator<std::uint64_t>>;
  struct Waiting {
    const WorkerInfo* caller = nullptr;  // that of its life, which the agent keeps
    Calls calls;
  };
  using Lists = std::map<WorkerLife, Waiting, std::less<>,
                         base::ReservedAllocator<std::pair<const WorkerLife, Waiting>>>;
  class Riding;  // those in a message that is being sent
  // Too many: sends them, or, those that could not be sent, leaves them to the timer.
  enum class WhenFull : std::uint8_t { send, wait };
  // False where there was no memory for a timer that they need.
  [[nodiscard]] bool add_all(const WorkerInfo& caller, std::span<const std::uint64_t> calls,
                             bool later, WhenFull when_full) STITCH_EXCLUDES(mutex_);
  // kMaxCreated of them at most.
  [[nodiscard]] Calls take(const WorkerInfo& caller) STITCH_EXCLUDES(mutex_);
  // False where there was no memory: they wait again.
  bool send(rpc::Agent& agent, const WorkerInfo& caller, std::span<const std::uint64_t> calls);
  void wait_again(const WorkerInfo& caller, std::span<const std::uint64_t> calls) noexcept;
  // Its calls would wait without end for answers that are lost.
  static void give_up(rpc::Agent& agent, const WorkerInfo& caller) noexcept;
  void flush_all() STITCH_EXCLUDES(mutex_);
  // Null after stop().
  [[nodiscard]] std::shared_ptr<rpc::Agent> agent() const STITCH_EXCLUDES(mutex_);

  mutable base::Mutex mutex_;
  rpc::Agent* agent_ STITCH_GUARDED_BY(mutex_);  // null after stop()
  Lists lists_ STITCH_GUARDED_BY(mutex_);
  SingleTimer timer_;
  std::atomic<std::size_t> waiting_{0};
};

}  // namespace stitch::rref
