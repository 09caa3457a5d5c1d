#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/rpc/future/future.h"
#include "stitch/rpc/message/owned_object.h"

namespace stitch::rpc {

// Where a worker puts up what it gives to a barrier or all_gather, for the others to fetch. A value
// comes down when each of the other participants has fetched it. Thread contract: any thread.
class GatherExchange {
 public:
  // Names one gathering of this worker: the same on all participants, which call in the same order.
  [[nodiscard]] std::string next_key(const std::vector<std::string>& sorted_names)
      STITCH_EXCLUDES(mutex_);
  // Puts up a value that will be fetched `times` times.
  void post(const std::string& key, OwnedObject value, std::size_t times) STITCH_EXCLUDES(mutex_);
  // The value, once it is up.
  [[nodiscard]] Future<OwnedObject> fetch(const std::string& key) STITCH_EXCLUDES(mutex_);
  // Takes everything down, for good: who waits, and whoever fetches later, gets `why`.
  void close(const Error& why) STITCH_EXCLUDES(mutex_);

 private:
  struct Entry {
    OwnedObject value;
    std::size_t left = 0;  // 0: not up yet
    std::vector<Promise<OwnedObject>> waiting;
  };
  base::Mutex mutex_;
  std::optional<Error> closed_ STITCH_GUARDED_BY(mutex_);
  std::map<std::string, std::uint64_t> generations_ STITCH_GUARDED_BY(mutex_);
  std::map<std::string, Entry> entries_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::rpc
