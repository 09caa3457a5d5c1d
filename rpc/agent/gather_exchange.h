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

namespace stitch::rpc {

// Publishes this worker's contributions to barriers and all_gathers; the other participants fetch
// them. A contribution is erased once each of them has fetched it. Thread contract: any thread;
// futures are completed without a lock.
class GatherExchange {
 public:
  // The key of this worker's next gathering among these lives of workers ("name/epoch"). All
  // participants get the same keys, because they call in the same order.
  [[nodiscard]] std::string next_key(const std::vector<std::string>& sorted_lives)
      STITCH_EXCLUDES(mutex_);
  // Publishes a value that will be fetched `times` times.
  void post(const std::string& key, OwnedObject value, std::size_t times) STITCH_EXCLUDES(mutex_);
  // Completes once the value is published.
  [[nodiscard]] Future<OwnedObject> fetch(const std::string& key) STITCH_EXCLUDES(mutex_);
  // A gathering in which a participant here or elsewhere still waits, for reports.
  struct Listed {
    std::string key;          // the names of its participants, and its number among them
    bool posted = false;      // this worker has arrived
    std::size_t left = 0;     // participants that have not fetched what it gave
    std::size_t waiting = 0;  // participants that wait for this worker to arrive
    std::chrono::steady_clock::time_point since;
  };
  [[nodiscard]] std::vector<Listed> list() const STITCH_EXCLUDES(mutex_);
  // Nothing is going to be published any more: what waits for that, now or later, fails with `why`.
  // What has been published can still be fetched; waits for that, until `deadline` at most.
  void leave(const Error& why, std::chrono::steady_clock::time_point deadline)
      STITCH_EXCLUDES(mutex_);
  // Erases everything: pending and later fetches fail with `why`.
  void close(const Error& why) STITCH_EXCLUDES(mutex_);

 private:
  struct Contribution {
    OwnedObject value;
    std::size_t left = 0;  // fetches to come; 0: not published yet
    std::vector<Promise<OwnedObject>> waiting;
    std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
  };
  mutable base::Mutex mutex_;
  base::CondVar fetched_;  // the last of what was published
  std::optional<Error> closed_ STITCH_GUARDED_BY(mutex_);
  std::optional<Error> leaving_ STITCH_GUARDED_BY(mutex_);
  std::map<std::string, std::uint64_t> generations_ STITCH_GUARDED_BY(mutex_);
  std::map<std::string, Contribution> contributions_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::rpc
