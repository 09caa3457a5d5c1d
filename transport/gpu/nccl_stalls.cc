// Transfers by NCCL that do not end: what is late breaks its pair, and of what only waits behind
// that the other end is told.

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/transport/gpu/device_transfers_impl.h"

namespace stitch::transport::gpu {
namespace {

constexpr std::chrono::milliseconds kMinTick(1);
constexpr std::chrono::milliseconds kMaxTick(100);
// An end that waits says so so often within the limit of a stall, and is believed for so many of
// these limits.
constexpr int kWaitsInALimit = 4;
constexpr int kLimitsOfBelief = 16;

using Launch = std::pair<const std::uint64_t, NcclPair::Launched>;

// The first of those that the pair has launched; null when it has none.
const Launch* first_launch(const NcclPair& pair) {
  const auto first = std::min_element(
      pair.launched.begin(), pair.launched.end(),
      [](const Launch& a, const Launch& b) { return a.second.order < b.second.order; });
  return first == pair.launched.end() ? nullptr : &*first;
}

}  // namespace

void DeviceTransfers::Impl::start_ticking() {
  {
    const base::MutexLock lock(mutex_);
    if (std::exchange(ticking_, true)) return;
  }
  const auto interval = std::clamp<std::chrono::nanoseconds>(
      std::min(options_.cts_timeout, options_.stall_timeout) / 8, kMinTick, kMaxTick);
  lanes_.connector().post_at(base::deadline_after(interval),
                             [self = shared_from_this()] { self->tick(); });
}

void DeviceTransfers::Impl::tick() {
  std::vector<std::pair<PairPtr, std::string>> late;
  std::vector<PairPtr> waiting;
  bool active = false;
  {
    const base::MutexLock lock(mutex_);
    ticking_ = false;
    const auto now = Clock::now();
    std::set<Lane*> lanes;
    // By stream: the pair of the first launch. None behind it can run.
    std::map<std::pair<Lane*, End>, const NcclPair*> fronts;
    const auto look = [&](const NcclPair& pair) {
      const Launch* const launch = first_launch(pair);
      if (launch == nullptr) return;
      const NcclPair*& front = fronts[{pair.lane, pair.end}];
      if (front == nullptr || launch->second.order < first_launch(*front)->second.order)
        front = &pair;
    };
    for (const auto& [token, pair] : ordered_) {
      lanes.insert(pair->lane);
      look(*pair);
    }
    for (const auto& [token, pair] : retiring_) look(*pair);
    // Those with a transfer whose turn has not come here: its other end may have launched it.
    std::set<TransferOrder::Pair> agreed;
    for (const auto& [stream, front] : fronts) {
      for (const TransferOrder::Pair token : stream.first->agreed()) agreed.insert(token);
    }
    for (const auto& [token, pair] : ordered_) {
      const Launch* const launch = first_launch(*pair);
      active = active || launch != nullptr;
      // After an abort that has hung nothing waits for it any more: the device has no NCCL.
      const bool alone = lanes_.quarantined(pair->lane->device());
      if (launch != nullptr && (alone || fronts.at({pair->lane, pair->end}) == pair.get())) {
        if (launch->second.deadline > now) continue;
        late.emplace_back(
            pair, "transfer " + std::to_string(launch->first) + " was launched and does not end");
      } else if ((launch != nullptr || (!alone && agreed.contains(token))) &&
                 now - pair->told_waits >= options_.stall_timeout / kWaitsInALimit) {
        pair->told_waits = now;
        waiting.push_back(pair);
      }
    }
    for (Lane* const lane : lanes) {
      active = active || lane->pending() > 0;
      for (const TransferOrder::Pair token : lane->overdue(options_.cts_timeout)) {
        const auto at = ordered_.find(token);
        if (at == ordered_.end()) continue;
        late.emplace_back(at->second, "no CTS from the destination in time");
      }
    }
  }
  if (active) start_ticking();  // first: what follows may throw, for want of memory
  for (const PairPtr& pair : waiting) {
    send_frame(pair->peer,
               encode(CommWaitsFrame{
                   pair->name, pair->end == End::source ? std::uint8_t{1} : std::uint8_t{0}}));
  }
  for (const auto& [pair, why] : late) break_pair(pair, Error(ErrorCode::timeout, why), true);
}

// Nothing of the pair can be done at this end either. Only for a while: what is behind it here
// waits, too.
void DeviceTransfers::Impl::on_comm_waits(PeerId from, const CommWaitsFrame& frame) {
  const base::MutexLock lock(mutex_);
  const PairPtr pair =
      find_pair(from, frame.from_source != 0 ? End::destination : End::source, frame.pair);
  if (pair == nullptr || pair->launched.empty()) return;
  const auto now = Clock::now();
  if (!pair->peer_waits) pair->peer_waits = now;
  if (now - *pair->peer_waits < kLimitsOfBelief * options_.stall_timeout) extend_deadlines(*pair);
}

void DeviceTransfers::Impl::extend_deadlines(NcclPair& pair) {
  for (auto& [number, launched] : pair.launched)
    launched.deadline = std::max(launched.deadline, base::deadline_after(launched.limit));
}

void DeviceTransfers::Impl::extend_deadlines(const Lane& lane, End end) {
  for (const auto& [token, pair] : ordered_) {
    if (pair->lane == &lane && pair->end == end) extend_deadlines(*pair);
  }
}

}  // namespace stitch::transport::gpu
