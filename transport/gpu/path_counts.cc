// What is counted of each path, and how a path that failed waits to be tried again.

#include <algorithm>
#include <utility>

#include "stitch/transport/gpu/device_transfers_impl.h"

namespace stitch::transport::gpu {

void DeviceTransfers::Impl::count(PeerId peer, int device, Path path, bool sent,
                                  std::size_t bytes) {
  PathCount& entry = counts_[{peer, device, path, sent}];
  entry.peer = peer;
  entry.device = device;
  entry.path = path;
  entry.sent = sent;
  ++entry.messages;
  entry.bytes += bytes;
}

void DeviceTransfers::Impl::path_worked(const Outgoing& transfer) {
  const auto source = static_cast<std::uint32_t>(transfer.source.device);
  const auto destination = static_cast<std::uint32_t>(transfer.to_device);
  if (transfer.path == Path::nccl) {
    const auto at = slots_.find({transfer.to, End::source, source, destination});
    if (at != slots_.end()) at->second.pause.success();
  } else if (transfer.path == Path::ipc) {
    const auto at = ipc_out_.find({transfer.to, source, destination});
    if (at != ipc_out_.end()) at->second.pause.success();
  } else if (transfer.path == Path::peer) {
    lanes_.peer_worked(transfer.source.device, transfer.to_device);
  }
}

void DeviceTransfers::Impl::path_failed(PeerId peer, int device, Path path) {
  if (!peers_[peer].lost) ++failures_[{peer, device, path}];
}

DeviceTransfers::Counters DeviceTransfers::Impl::counters() const {
  const base::MutexLock lock(mutex_);
  Counters counters;
  for (const auto& [key, entry] : counts_) counters.paths.push_back(entry);
  for (const auto& [key, failures] : failures_) {
    const auto& [peer, device, path] = key;
    counters.failures.push_back({peer, device, path, failures});
  }
  for (const auto& [key, slot] : slots_) {
    if (std::get<1>(key) == End::source && slot.pair == nullptr && !slot.pause.over())
      ++counters.paused;
  }
  for (const auto& [key, memory] : ipc_out_) {
    if (memory.state == PathState::closed && (memory.mapped || !memory.pause.over()))
      ++counters.paused;
  }
  counters.paused += lanes_.paused_peers();
  counters.silences = silences_;
  counters.breaks = breaks_;
  counters.retries = retries_;
  counters.outgoing = outgoing_.size();
  counters.incoming = incoming_.size();
  return counters;
}

std::size_t DeviceTransfers::Impl::under_way() const {
  const base::MutexLock lock(mutex_);
  return outgoing_.size() +
         static_cast<std::size_t>(std::count_if(incoming_.begin(), incoming_.end(),
                                                [](const auto& at) { return at.second->wanted; }));
}

}  // namespace stitch::transport::gpu
