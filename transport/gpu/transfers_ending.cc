// How transfers end when a peer is lost, and when this worker shuts down.

#include <algorithm>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/transport/gpu/device_transfers_impl.h"

namespace stitch::transport::gpu {

void DeviceTransfers::Impl::on_peer_lost(PeerId peer, const Error& why) {
  std::vector<PairPtr> pairs;
  std::vector<OutgoingPtr> outgoing;
  std::vector<IncomingPtr> incoming;
  {
    const base::MutexLock lock(mutex_);
    Peer& state = peers_[peer];
    if (state.lost) return;
    state.lost = why;
    for (const auto& [key, slot] : slots_) {
      if (std::get<0>(key) == peer && slot.pair != nullptr) pairs.push_back(slot.pair);
    }
    for (const auto& [id, transfer] : outgoing_) {
      if (transfer->to == peer) outgoing.push_back(transfer);
    }
    for (const auto& [key, transfer] : incoming_) {
      if (key.first == peer) incoming.push_back(transfer);
    }
  }
  for (const PairPtr& pair : pairs) break_pair(pair, why, false);
  for (const OutgoingPtr& transfer : outgoing) end(transfer, why);
  for (const IncomingPtr& transfer : incoming) end(transfer, why);
  const base::MutexLock lock(mutex_);
  const auto is_its = [peer](const auto& entry) { return std::get<0>(entry.first) == peer; };
  std::erase_if(slots_, is_its);
  std::erase_if(failures_, is_its);
}

void DeviceTransfers::Impl::shutdown(std::chrono::steady_clock::time_point deadline) {
  const Error why(ErrorCode::shutting_down, "device transfers of this worker are closed");
  std::vector<PairPtr> pairs;
  std::vector<OutgoingPtr> outgoing;
  std::vector<IncomingPtr> incoming;
  {
    const base::MutexLock lock(mutex_);
    if (std::exchange(closing_, true)) return;
    const auto busy = [this]() STITCH_REQUIRES(mutex_) {
      if (!outgoing_.empty()) return true;
      for (const auto& [key, transfer] : incoming_) {
        if (transfer->wanted) return true;
      }
      return false;
    };
    while (busy() && changed_.wait_until(mutex_, deadline)) {
    }
    for (const auto& [key, slot] : slots_) {
      if (slot.pair != nullptr) pairs.push_back(slot.pair);
    }
    for (const auto& [id, transfer] : outgoing_) outgoing.push_back(transfer);
    for (const auto& [key, transfer] : incoming_) incoming.push_back(transfer);
  }
  for (const PairPtr& pair : pairs) break_pair(pair, why, true);
  for (const OutgoingPtr& transfer : outgoing) cancel(transfer, why);
  for (const IncomingPtr& transfer : incoming) finish(transfer, why);
  const base::MutexLock lock(mutex_);
  closed_ = true;
  // Only a device that hangs keeps its lane from calling.
  const auto limit = std::max(deadline, base::deadline_after(options_.abort_timeout));
  while (calls_ > 0 && changed_.wait_until(mutex_, limit)) {
  }
}

}  // namespace stitch::transport::gpu
