// A peer that stops while its connection stays up: each end that has transfers under way with
// another says so from time to time, and ends them when the other says nothing any more.

#include <algorithm>
#include <string>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/transport/gpu/device_transfers_impl.h"

namespace stitch::transport::gpu {
namespace {

constexpr std::chrono::milliseconds kMinInterval(1);
constexpr std::chrono::seconds kMaxInterval(1);

}  // namespace

void DeviceTransfers::Impl::start_watching() {
  {
    const base::MutexLock lock(mutex_);
    if (closed_ || std::exchange(watching_, true)) return;
  }
  const auto interval = std::clamp<std::chrono::nanoseconds>(
      std::min(options_.silence_timeout, options_.stall_timeout) / 8, kMinInterval, kMaxInterval);
  const auto due = base::deadline_after(interval);
  lanes_.connector().post_at(due, [self = shared_from_this(), due] { self->watch_peers(due); });
}

void DeviceTransfers::Impl::watch_peers(Clock::time_point due) {
  const auto limit = options_.silence_timeout;
  const auto now = Clock::now();
  // This process was stopped itself: what it has not heard may wait to be read.
  const bool late = now - due > limit / 2;
  std::vector<PeerId> tell;
  std::vector<PeerId> silent;
  std::vector<OutgoingPtr> starved;
  bool active = false;
  {
    const base::MutexLock lock(mutex_);
    watching_ = false;
    struct Seen {
      bool under_way = false;
      bool owes = false;
    };
    std::map<PeerId, Seen> seen;
    for (const auto& [id, transfer] : outgoing_) {
      Seen& with = seen[transfer->to];
      with.under_way = true;
      with.owes = with.owes || transfer->announced;
    }
    for (const auto& [key, transfer] : incoming_) {
      if (transfer->refused) continue;
      Seen& with = seen[key.first];
      with.under_way = true;
      with.owes = with.owes || transfer->wanted;
    }
    for (auto& [id, peer] : peers_) {
      Seen with = seen[id];
      with.under_way = with.under_way || peer.unacknowledged > 0;
      if (peer.lost || !with.under_way) {
        peer.told.reset();
        peer.heard.reset();
        continue;
      }
      active = true;
      if (!peer.told) peer.told = now;  // it is not told of those that are soon over
      if (now - *peer.told >= limit / 4) {
        peer.told = now;
        tell.push_back(id);
      }
      if (!with.owes) {
        peer.heard.reset();
      } else if (!peer.heard || late) {
        peer.heard = now;
      } else if (now - *peer.heard >= limit) {
        ++silences_;
        peer.heard.reset();
        silent.push_back(id);
      }
    }
    starved = without_slot(now);
  }
  for (const PeerId peer : tell) send_frame(peer, encode(AliveFrame{}));
  for (const PeerId peer : silent) end_silent(peer);
  for (const OutgoingPtr& transfer : starved)
    ask_to_break_ipc(transfer, Error(ErrorCode::timeout, "peers do not give back its memory"));
  if (active) start_watching();
}

// Lent slots do not come back before their peer is heard of or lost: it may still read them.
std::vector<DeviceTransfers::Impl::OutgoingPtr> DeviceTransfers::Impl::without_slot(
    Clock::time_point now) const {
  std::vector<OutgoingPtr> starved;
  for (const auto& [id, transfer] : outgoing_) {
    if (transfer->slot_wanted && now - *transfer->slot_wanted >= options_.stall_timeout)
      starved.push_back(transfer);
  }
  return starved;
}

void DeviceTransfers::Impl::end_silent(PeerId peer) {
  const Error why(ErrorCode::timeout,
                  "the peer has not been heard of for " +
                      std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(
                                         options_.silence_timeout)
                                         .count()) +
                      " ms");
  std::vector<OutgoingPtr> outgoing;
  std::vector<IncomingPtr> incoming;
  {
    const base::MutexLock lock(mutex_);
    for (const auto& [id, transfer] : outgoing_) {
      if (transfer->to == peer && transfer->announced) outgoing.push_back(transfer);
    }
    for (const auto& [key, transfer] : incoming_) {
      if (key.first == peer && transfer->wanted) incoming.push_back(transfer);
    }
  }
  for (const OutgoingPtr& transfer : outgoing) cancel(transfer, why);
  for (const IncomingPtr& transfer : incoming) finish(transfer, why, true);
}

}  // namespace stitch::transport::gpu
