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
  const auto begun = Clock::now();
  lanes_.connector().post_at(begun + interval, [self = shared_from_this(), begun, interval] {
    self->watch_peers(begun, interval);
  });
}

void DeviceTransfers::Impl::watch_peers(Clock::time_point begun,
                                        std::chrono::nanoseconds interval) {
  const auto limit = options_.silence_timeout;
  const auto now = Clock::now();
  // Time in which this process did not run itself is no silence of others: what they have said
  // meanwhile waits to be read. Nor may it begin anew then: on a machine that is always late no
  // peer would ever be silent for long enough.
  const auto listened =
      std::min<std::chrono::nanoseconds>(now - begun, std::max(interval, limit / 8));
  std::vector<PeerId> tell;
  std::vector<PeerId> silent;
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
        peer.silent.reset();
        continue;
      }
      active = true;
      if (!peer.told) peer.told = now;  // it is not told of those that are soon over
      if (now - *peer.told >= limit / 4) {
        peer.told = now;
        tell.push_back(id);
      }
      if (!with.owes) {
        peer.silent.reset();
      } else if (!peer.silent) {
        peer.silent = std::chrono::nanoseconds(0);
      } else if (*peer.silent += listened; *peer.silent >= limit) {
        ++silences_;
        peer.silent.reset();
        silent.push_back(id);
      }
    }
  }
  if (active) start_watching();  // first: what follows may throw, for want of memory
  for (const PeerId peer : tell) send_frame(peer, encode(AliveFrame{}));
  for (const PeerId peer : silent) end_silent(peer);
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
