#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/world/open_store.h"
#include "stitch/rpc/world/world_record.h"

namespace stitch::rpc {

// Keeps the record of the running world in its store, where workers that start find it. Every
// worker has one; the live worker with the lowest id does the work, on a thread that it starts for
// that: it writes the record when the members change or when the store has come back empty (a new
// worker of rank 0 serves it; the file was deleted or replaced), and answers those that ring, so
// that they know the world from a dead one. That a store is away which a worker serves is not
// reported: it is needed for joins only, and looked for again until it is there. What else keeps
// the record from it is said once, on stderr. Part of what an Agent keeps until its end. Thread
// contract: any thread; no lock is held while it asks the agent.
class WorldKeeper {
 public:
  // `record`: of the world as this worker found it.
  WorldKeeper(OpenStore opened, WorldRecord record);
  // Ends the thread, which may be in a request to the store for at most kStoreTimeout.
  ~WorldKeeper();

  // To be called once, when the agent has started.
  void start(const std::shared_ptr<Agent>& agent) STITCH_EXCLUDES(mutex_);
  // The members have changed. Does not block.
  void on_change() STITCH_EXCLUDES(mutex_);
  // All workers have agreed to leave, or this one leaves as the last: nothing is to be joined any
  // more. Takes the record away, if it keeps it and the store answers within kStoreTimeout; returns
  // at `deadline` all the same. May be called again.
  void end_world(std::chrono::steady_clock::time_point deadline) STITCH_EXCLUDES(mutex_);
  // No new work is begun. Does not block.
  void stop() STITCH_EXCLUDES(mutex_);

 private:
  void run() STITCH_EXCLUDES(mutex_);
  [[nodiscard]] bool keeps(const Agent& agent) const;
  // False: a store that a worker serves is away.
  bool look_after_store(Agent& agent, bool ending) noexcept STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::optional<Error> try_store(Agent& agent, bool ending) STITCH_EXCLUDES(mutex_);
  void report(const Agent& agent, const Error& failure);
  // False: the store has the record of another world.
  bool write_record(transport::Store& store, bool ending);
  void answer(transport::Store& store);
  void update_entries(const Agent& agent);
  void start_thread() STITCH_EXCLUDES(mutex_);

  const OpenStore opened_;

  // The thread only.
  WorldRecord record_;
  std::shared_ptr<transport::Store> store_;  // null: to be opened again
  bool another_world_reported_ = false;
  bool failure_reported_ = false;

  std::atomic<bool> without_thread_reported_{false};

  base::Mutex mutex_;
  base::CondVar changed_;
  std::weak_ptr<Agent> agent_ STITCH_GUARDED_BY(mutex_);
  std::uint64_t changes_ STITCH_GUARDED_BY(mutex_) = 0;
  bool ending_ STITCH_GUARDED_BY(mutex_) = false;
  bool ended_ STITCH_GUARDED_BY(mutex_) = false;  // the record is gone, or cannot be reached
  bool stopped_ STITCH_GUARDED_BY(mutex_) = false;
  std::thread thread_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::rpc
