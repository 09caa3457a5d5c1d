#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stitch/base/event_loop.h"
#include "stitch/base/mutex.h"
#include "stitch/rpc/agent/deadline_watch.h"
#include "stitch/rpc/future/future.h"
#include "stitch/rpc/message/owned_object.h"
#include "stitch/rpc/message/worker_info.h"

namespace stitch::rpc {

// Publishes this worker's contributions to barriers and all_gathers (gatherings); the other
// participants fetch them. A contribution is erased once each of them has fetched it or is lost, or
// when its time is over, since a gathering may fail for some; what waits for one is erased when its
// caller stops waiting or is lost. Thread contract: any thread; futures are completed, and values
// destroyed, without a lock.
class GatherExchange {
 public:
  using Clock = std::chrono::steady_clock;
  // Has expire() called on the event loop while `owner` lives, which holds this. Before post().
  void start(const std::weak_ptr<base::EventLoop>& loop, std::weak_ptr<void> owner);
  // Publishes a value in this worker's next gathering among these lives of workers, sorted by name,
  // and returns the gathering's key: all participants get the same ones, because they call in the
  // same order. Each of `others` will fetch it, until `over` at the latest; max(): without a limit.
  [[nodiscard]] std::string post(const std::vector<WorkerInfo>& lives, OwnedObject value,
                                 std::vector<WorkerInfo> others, Clock::time_point over)
      STITCH_EXCLUDES(mutex_);
  // Erases what is over, and has itself called again.
  void expire(Clock::time_point now) STITCH_EXCLUDES(mutex_);
  struct Fetched {
    // Completes once the value is published; at once with `timeout` when it is kept no more, with
    // `invalid_argument` when that is no gathering of the caller.
    Future<OwnedObject> value;
    std::uint64_t wait = 0;  // for stop_waiting()
  };
  [[nodiscard]] Fetched fetch(const std::string& key, const WorkerInfo& from)
      STITCH_EXCLUDES(mutex_);
  // The caller of that fetch does not wait any more: it fails with `cancelled`, if it has not
  // completed.
  void stop_waiting(const std::string& key, std::uint64_t wait) noexcept STITCH_EXCLUDES(mutex_);
  // That life fetches nothing any more.
  void on_lost(const WorkerInfo& life) noexcept STITCH_EXCLUDES(mutex_);
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
    Promise<OwnedObject> promise{};
    std::uint64_t number = 0;
  };
  using Fetches = std::list<Fetch>;
  struct Contribution {
    OwnedObject value;
    bool posted = false;
    std::vector<WorkerInfo> left;  // those that have not fetched it
    Fetches waiting;               // until it is posted
    Clock::time_point since = Clock::now();
    Clock::time_point over = Clock::time_point::max();
    [[nodiscard]] bool done() const noexcept { return posted ? left.empty() : waiting.empty(); }
  };
  using Contributions = std::map<std::string, Contribution>;
  // The gatherings of one set of lives. Kept when one of them is lost: the survivors may begin
  // another one before they all know, and have to agree about its number.
  struct Set {
    std::vector<WorkerInfo> lives;
    std::uint64_t next = 0;  // number
    bool over = false;       // one of its lives was lost
    int passed = 0;          // sets that were begun since
  };
  // Sets of workers that one was lost of are remembered so long, so that those left agree on the
  // number of the next gathering, and not longer: names of an elastic world may never come back.
  static constexpr int kSetsKept = 64;
  // Moves it to `dropped` if it is needed no more, and returns the next one.
  Contributions::iterator drop_if_done(Contributions::iterator at, Contributions& dropped) noexcept
      STITCH_REQUIRES(mutex_);
  // Made with its first gathering; forgets those of lives that others of these have followed.
  Set& set_of(const std::string& names, const std::vector<WorkerInfo>& lives)
      STITCH_REQUIRES(mutex_);
  static void fail(Fetches& fetches, const Error& why) noexcept;

  const Error stopped_{ErrorCode::cancelled, "its caller waits no more"};
  std::shared_ptr<DeadlineWatch> watch_;  // constant after start()
  mutable base::Mutex mutex_;
  base::CondVar fetched_;  // the last of what was published
  std::optional<Error> closed_ STITCH_GUARDED_BY(mutex_);
  std::optional<Error> leaving_ STITCH_GUARDED_BY(mutex_);
  std::map<std::string, Set> sets_ STITCH_GUARDED_BY(mutex_);
  Contributions contributions_ STITCH_GUARDED_BY(mutex_);
  std::uint64_t fetches_ STITCH_GUARDED_BY(mutex_) = 0;  // that had to wait, so far
};

}  // namespace stitch::rpc
