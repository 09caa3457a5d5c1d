#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/transport/gpu/device_transfers.h"

namespace stitch::transport::gpu {

// What one worker has to report of its paths: transfers by each, failures of each, and the lines
// that say why a better path is not used, one for each peer and kind of reason. Owned by Transfers.
// Thread contract: any thread; its lock is held for nothing else.
class PathReport {
 public:
  // Kinds of reasons: a path by its number, or one of these.
  static constexpr unsigned kVersions = kPaths;
  static constexpr unsigned kQuarantine = kPaths + 1;
  static constexpr unsigned kSealed = kPaths + 2;
  // Says that text of that peer, on another thread.
  using Say = std::function<void(PeerId peer, std::string text)>;

  explicit PathReport(Say say) : say_(std::move(say)) {}

  // A transfer of this worker's `device` has ended well.
  void count(PeerId peer, int device, Path path, bool sent, std::size_t bytes);
  // A path of this device has been refused, or has broken.
  void failed(PeerId peer, int device, Path path, const std::string& why);
  // Unless this kind of reason has been said of the peer, or the peer is forgotten.
  void say(PeerId peer, unsigned reason, std::string text);
  // The peer is lost: its failures count no more, and nothing more is said of it.
  void forget(PeerId peer);
  void add_to(DeviceTransfers::Counters& counters) const;

 private:
  const Say say_;
  mutable base::Mutex mutex_;
  std::map<std::tuple<PeerId, int, Path, bool>, DeviceTransfers::PathCount> counts_
      STITCH_GUARDED_BY(mutex_);
  std::map<std::tuple<PeerId, int, Path>, std::uint64_t> failures_ STITCH_GUARDED_BY(mutex_);
  std::set<std::pair<PeerId, unsigned>> said_ STITCH_GUARDED_BY(mutex_);
  std::set<PeerId> lost_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::transport::gpu
