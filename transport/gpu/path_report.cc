#include "stitch/transport/gpu/path_report.h"

namespace stitch::transport::gpu {

void PathReport::count(PeerId peer, int device, Path path, bool sent, std::size_t bytes) {
  const base::MutexLock lock(mutex_);
  DeviceTransfers::PathCount& entry = counts_[{peer, device, path, sent}];
  entry.peer = peer;
  entry.device = device;
  entry.path = path;
  entry.sent = sent;
  ++entry.messages;
  entry.bytes += bytes;
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

void PathReport::add_to(DeviceTransfers::Counters& counters) const {
  const base::MutexLock lock(mutex_);
  for (const auto& [key, entry] : counts_) counters.paths.push_back(entry);
  for (const auto& [key, failures] : failures_) {
    const auto& [peer, device, path] = key;
    counters.failures.push_back({peer, device, path, failures});
  }
}

}  // namespace stitch::transport::gpu
