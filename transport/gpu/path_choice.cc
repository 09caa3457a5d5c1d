#include "stitch/transport/gpu/path_choice.h"

#include <algorithm>
#include <atomic>
#include <fstream>

#include "stitch/base/deadline.h"
#include "stitch/base/forked.h"
#include "stitch/base/hash.h"
#include "stitch/base/mutex.h"
#include "stitch/base/random.h"

namespace stitch::transport::gpu {
namespace {

std::array<std::uint64_t, 2> host_id() {
  std::string text;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> text;
  std::array<std::uint64_t, 2> id{0, 1};
  for (const char letter : text) {
    id[0] = base::mix_bits(id[0] + static_cast<unsigned char>(letter));
    id[1] = base::mix_bits(id[1] ^ id[0]);
  }
  return id;
}

}  // namespace

std::string_view to_string(Path path) noexcept {
  constexpr std::array<std::string_view, kPaths> kNames{"staging", "local copy", "peer copy",
                                                        "NCCL"};
  return kNames.at(static_cast<std::size_t>(path));
}

std::string_view short_name(Path path) noexcept {
  constexpr std::array<std::string_view, kPaths> kNames{"staging", "local", "peer", "nccl"};
  return kNames.at(static_cast<std::size_t>(path));
}

ProcessIdentity this_process() {
  static base::Mutex mutex;
  static ProcessIdentity identity;
  static std::uint32_t forks = ~0U;
  const base::MutexLock lock(mutex);
  if (forks != base::fork_count()) {
    identity = {host_id(), base::random_number()};
    forks = base::fork_count();
  }
  return identity;
}

void PathPause::failure(std::chrono::nanoseconds first) {
  length_ = std::clamp(2 * length_, first, std::max(first, kLongest));
  until_ = base::deadline_after(length_);
}

bool nccl_versions_match(int one, int other) noexcept { return one != 0 && one == other; }

PathChoice choose_path(const PathEnd& source, const PathEnd& destination, const PathStates& states,
                       std::size_t bytes) {
  PathChoice choice;
  if (bytes == 0) return choice;
  if (source.process == destination.process) {
    if (source.device == destination.device) {
      choice.path = Path::local;
    } else if (states.peer == PathState::open) {
      choice.path = Path::peer;
    } else {
      choice.test_peer = states.peer == PathState::untried;
    }
    return choice;
  }
  const bool one_host = source.process.host == destination.process.host;
  // NCCL refuses two ranks on one GPU.
  if (one_host && source.device_uuid == destination.device_uuid) return choice;
  choice.sealed = !one_host && !states.nccl_between_hosts;
  if (choice.sealed) return choice;
  choice.versions_differ = !nccl_versions_match(source.nccl_version, destination.nccl_version);
  if (choice.versions_differ) return choice;
  choice.open_nccl = states.nccl == PathState::untried;
  if (states.nccl == PathState::open) choice.path = Path::nccl;
  return choice;
}

void PathReport::count(PeerId peer, int device, Path path, bool sent, std::size_t bytes) {
  const base::MutexLock lock(mutex_);
  PathCount& entry = counts_[{peer, device, path, sent}];
  entry = {peer, device, path, sent, entry.messages + 1, entry.bytes + bytes};
}

void PathReport::failed(PeerId peer, int device, Path path, const std::string& why) {
  {
    const base::MutexLock lock(mutex_);
    if (lost_.contains(peer)) return;
    ++failures_[{peer, device, path}];
  }
  say(peer, static_cast<unsigned>(path),
      std::string(to_string(path)) + " of device " + std::to_string(device) +
          " is not used, pinned memory is: " + why);
}

void PathReport::say(PeerId peer, unsigned reason, std::string text) {
  {
    const base::MutexLock lock(mutex_);
    if (lost_.contains(peer) || !said_.insert({peer, reason}).second) return;
  }
  say_(peer, std::move(text));
}

void PathReport::forget(PeerId peer) {
  const base::MutexLock lock(mutex_);
  lost_.insert(peer);
  std::erase_if(failures_, [peer](const auto& each) { return std::get<0>(each.first) == peer; });
}

void PathReport::add_to(std::vector<PathCount>& counts, std::vector<PathFailures>& failures) const {
  const base::MutexLock lock(mutex_);
  for (const auto& [key, entry] : counts_) counts.push_back(entry);
  for (const auto& [key, number] : failures_) {
    const auto& [peer, device, path] = key;
    failures.push_back({peer, device, path, number});
  }
}

}  // namespace stitch::transport::gpu
