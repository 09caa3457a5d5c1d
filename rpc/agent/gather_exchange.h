#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/rpc/future/future.h"
#include "stitch/rpc/message/owned_object.h"
#include "stitch/rpc/message/worker_info.h"

namespace stitch::rpc {

// Publishes this worker's contributions to barriers and all_gathers (gatherings); the other
// participants fetch them. A contribution is erased once each of them has fetched it or is lost, or
// when its time is over, since a gathering may fail for some; what waits for one is erased when its
// caller stops waiting or is lost. Thread contract: any thread; futures are completed without a
// lock.
class GatherExchange {
 public:
  using Clock = std::chrono::steady_clock;
  struct Posted {
    // All participants get the same keys, because they call in the same order.
    std::string key;
    // When expire() is to be called; nothing: another call has been asked for, or none is needed.
    std::optional<Clock::time_point> expires{};
  };
  // Publishes a value in this worker's next gathering among these lives of workers, sorted by name.
  // Each of `others` will fetch it, until `over` at the latest; max(): without a limit.
  [[nodiscard]] Posted post(const std::vector<WorkerInfo>& lives, OwnedObject value,
                            std::vector<WorkerInfo> others, Clock::time_point over)
      STITCH_EXCLUDES(mutex_);
  // Erases what is over, and returns when to call this again; nothing: post() will say.
  [[nodiscard]] std::optional<Clock::time_point> expire(Clock::time_point now)
      STITCH_EXCLUDES(mutex_);
  // Completes once the value is published; at once, with `cancelled`, when it is kept no more.
  [[nodiscard]] Future<OwnedObject> fetch(const std::string& key, const WorkerInfo& from)
      STITCH_EXCLUDES(mutex_);
  // `from` does not wait for that any more: its fetch fails with `cancelled`.
  void stop_waiting(const std::string& key, const WorkerInfo& from) STITCH_EXCLUDES(mutex_);
  // That life fetches nothing any more, and its gatherings are not counted on.
  void on_lost(const WorkerInfo& life) STITCH_EXCLUDES(mutex_);
  // A gathering in which a participant here or elsewhere still waits, for reports.
  struct Listed {
    std::string key;          // the names of its participants, and its number among them
    bool posted = false;      // this worker has arrived
    std::size_t left = 0;     // participants that have not fetched what it gave
    std::size_t waiting = 0;  // participants that wait for this worker to arrive
    Clock::time_point since;
  };
  [[nodiscard]] std::vector<Listed> list() const STITCH_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t size() const STITCH_EXCLUDES(mutex_);
  // Nothing is going to be published any more: what waits for that, now or later, fails with `why`.
  // What has been published can still be fetched; waits for that, until `deadline` at most.
  void leave(const Error& why, Clock::time_point deadline) STITCH_EXCLUDES(mutex_);
  // Erases everything: pending and later fetches fail with `why`.
  void close(const Error& why) STITCH_EXCLUDES(mutex_);

 private:
  struct Fetch {
    WorkerInfo from;
    Promise<OwnedObject> promise;
  };
  struct Contribution {
    OwnedObject value;
    bool posted = false;
    std::vector<WorkerInfo> left;  // those that have not fetched it
    std::vector<Fetch> waiting;    // until it is posted
    Clock::time_point since = Clock::now();
    Clock::time_point over = Clock::time_point::max();
    [[nodiscard]] bool done() const noexcept { return posted ? left.empty() : waiting.empty(); }
  };
  using Contributions = std::map<std::string, Contribution>;
  // The gatherings of one set of lives.
  struct Set {
    std::vector<WorkerInfo> lives;
    std::uint64_t next = 0;  // number
  };
  // Moves it to `dropped` if it is needed no more, and returns the next one. The values are the
  // program's: destroyed without the lock.
  Contributions::iterator drop_if_done(Contributions::iterator at, Contributions& dropped)
      STITCH_REQUIRES(mutex_);
  // Whether this worker has been in the gathering already.
  [[nodiscard]] bool has_passed(const std::string& key) const STITCH_REQUIRES(mutex_);

  mutable base::Mutex mutex_;
  base::CondVar fetched_;  // the last of what was published
  std::optional<Error> closed_ STITCH_GUARDED_BY(mutex_);
  std::optional<Error> leaving_ STITCH_GUARDED_BY(mutex_);
  std::map<std::string, Set> sets_ STITCH_GUARDED_BY(mutex_);
  Contributions contributions_ STITCH_GUARDED_BY(mutex_);
  std::optional<Clock::time_point> expires_ STITCH_GUARDED_BY(mutex_);  // the call asked for
};

}  // namespace stitch::rpc
