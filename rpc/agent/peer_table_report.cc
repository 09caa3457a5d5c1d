// What a PeerTable tells of itself: in texts of errors and in debug_info.
#include <chrono>
#include <string>

#include "stitch/rpc/agent/call_table.h"
#include "stitch/rpc/agent/peer_table.h"

namespace stitch::rpc {

namespace {
// A worker that was heard of so lately is called alive.
constexpr std::chrono::seconds kLately{1};
}  // namespace

std::string PeerTable::condition(WorkerId id) const {
  base::MutexLock lock(mutex_);
  const Peer& peer = peers_[id.value()];
  if (peer.lost) return "worker is gone";
  if (!peer.bound) {
    return "worker is not connected" +
           (peer.failure ? std::string(": ") + peer.failure->what() : std::string(" yet"));
  }
  const Clock::duration silent =
      Clock::now().time_since_epoch() -
      Clock::duration(heard_[id.value()].load(std::memory_order_relaxed));
  if (silent <= kLately) return "worker is alive";
  return "worker is connected and has been silent for " + duration_text(silent);
}

std::size_t PeerTable::connections() const {
  base::MutexLock lock(mutex_);
  std::size_t count = 0;
  for (const auto& peer : peers_) count += peer.bound ? 1 : 0;
  return count;
}

void PeerTable::debug_info(std::map<std::string, std::int64_t>& numbers) const {
  for (const auto& endpoint : endpoints_) {
    for (const auto& [name, count] : endpoint->counters()) numbers[name] += count;
  }
}

}  // namespace stitch::rpc
