#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "stitch/base/mutex.h"

namespace stitch::transport::gpu {

// One life of one worker of the world, numbered by the layer above: a worker that comes back has
// another PeerId.
using PeerId = std::uint64_t;

// How the bytes of one transfer travel. The numbers are on the wire.
enum class Path : std::uint8_t {
  staging = 0,  // through pinned host memory and the workers' connection
  local = 1,    // one copy on the device, within a process
  peer = 2,     // one copy from device to device, within a process
  nccl = 3,     // a two-rank communicator
};
inline constexpr std::size_t kPaths = 4;
[[nodiscard]] std::string_view to_string(Path path) noexcept;
// As counters name it: "staging", "local", "peer", "nccl".
[[nodiscard]] std::string_view short_name(Path path) noexcept;

// The process of a worker. Equal identities: the same process.
struct ProcessIdentity {
  std::array<std::uint64_t, 2> host{};  // of its boot
  std::uint64_t process = 0;            // random, so that no two processes have the same
  friend bool operator==(const ProcessIdentity&, const ProcessIdentity&) = default;
};
// The identity of this process; a forked child has another. Any thread.
[[nodiscard]] ProcessIdentity this_process();

// One end of an ordered pair of devices.
struct PathEnd {
  ProcessIdentity process;
  std::array<char, 16> device_uuid{};
  int device = 0;
  int nccl_version = 0;  // 0: no NCCL, or not to be used
};

// The state of a path between two devices.
enum class PathState : std::uint8_t {
  untried,  // or broken, with its pause over
  opening,  // being opened or tested
  open,     // has passed its test
  closed,   // refused or broken, during its pause
};

// The pause before a path that was refused or broke is tried again. Not thread-safe.
class PathPause {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // NCCL leaves a thread behind for each communicator that does not come up.
  static constexpr std::chrono::nanoseconds kLongest = std::chrono::hours(1);

  // The path has failed. The first pause is `first`; each later pause without a success() before it
  // is twice as long, up to kLongest or `first`, whichever is longer.
  void failure(std::chrono::nanoseconds first);
  // A transfer has come by the path.
  void success() { length_ = std::chrono::nanoseconds(0); }
  [[nodiscard]] std::chrono::nanoseconds length() const { return length_; }
  [[nodiscard]] bool over() const { return std::chrono::steady_clock::now() >= until_; }

 private:
  std::chrono::nanoseconds length_{0};
  Time until_{};
};

// The states of the paths from one device to another.
struct PathStates {
  PathState peer = PathState::closed;
  PathState nccl = PathState::closed;
  bool nccl_between_hosts = true;
};

struct PathChoice {
  Path path = Path::staging;
  bool open_nccl = false;        // a communicator is to be opened meanwhile
  bool test_peer = false;        // copies between the devices are to be tested meanwhile
  bool versions_differ = false;  // the versions of NCCL forbid it
  bool sealed = false;           // encryption between hosts forbids NCCL
};

// Two ends of a communicator have one version of NCCL, to the last number: NCCL itself demands it.
[[nodiscard]] bool nccl_versions_match(int one, int other) noexcept;

// The path of a transfer of `bytes` from `source` to `destination`. Pure.
[[nodiscard]] PathChoice choose_path(const PathEnd& source, const PathEnd& destination,
                                     const PathStates& states, std::size_t bytes);

// Completed transfers by one path.
struct PathCount {
  PeerId peer = 0;
  int device = 0;  // of this worker
  Path path = Path::staging;
  bool sent = false;  // else received
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;
};
// The times that a path was refused or broke, as this end noticed.
struct PathFailures {
  PeerId peer = 0;
  int device = 0;  // of this worker
  Path path = Path::staging;
  std::uint64_t failures = 0;
};

// The report of one worker's paths: transfers and failures of each path, and the lines that say why
// a better path is not used, once for each peer and kind of reason. Owned by Transfers. Thread
// contract: any thread; its lock is held for nothing else.
class PathReport {
 public:
  // Kinds of reasons: the number of a path that failed, or one of these.
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
  // Says `text`, once for each peer and kind of reason.
  void say(PeerId peer, unsigned reason, std::string text);
  // The peer is lost: the report forgets its failures, and says nothing more of it.
  void forget(PeerId peer);
  void add_to(std::vector<PathCount>& counts, std::vector<PathFailures>& failures) const;

 private:
  const Say say_;
  mutable base::Mutex mutex_;
  std::map<std::tuple<PeerId, int, Path, bool>, PathCount> counts_ STITCH_GUARDED_BY(mutex_);
  std::map<std::tuple<PeerId, int, Path>, std::uint64_t> failures_ STITCH_GUARDED_BY(mutex_);
  std::set<std::pair<PeerId, unsigned>> said_ STITCH_GUARDED_BY(mutex_);
  std::set<PeerId> lost_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::transport::gpu
