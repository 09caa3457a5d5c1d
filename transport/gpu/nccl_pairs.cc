// One file, though long: each step of a pair depends on those before it.
// The lives of two-rank communicators: opened in the background, tested by a first transfer, broken
// by the first error at either end, aborted, opened again after a while.

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/transport/gpu/device_transfers_impl.h"
#include "stitch/transport/gpu/own_thread.h"

namespace stitch::transport::gpu {
namespace {

constexpr std::chrono::milliseconds kPollInterval(1);
constexpr std::chrono::milliseconds kAbortAgain(100);
// Of one name and not aborted yet: a source that breaks and opens faster waits for its pause.
constexpr std::size_t kMaxUnfinished = 4;
constexpr std::size_t kMinPieceBytes = 4096;
constexpr std::size_t kMaxPieceBytes = Lane::kSinkBytes;

}  // namespace

PathState DeviceTransfers::Impl::nccl_state(const PairSlot& slot, int device) const {
  if (own_nccl() == 0 || lanes_.quarantined(device) || lanes_.held(device)) {
    return PathState::closed;
  }
  if (slot.pair == nullptr) {
    return slot.pause.over() ? PathState::untried : PathState::closed;
  }
  return slot.pair->state == NcclPair::State::open ? PathState::open : PathState::opening;
}

bool DeviceTransfers::Impl::broken(const NcclPair& pair) const {
  const base::MutexLock lock(mutex_);
  return pair.state == NcclPair::State::broken;
}

Error DeviceTransfers::Impl::nccl_error(NcclPair& pair, nccl::Result result,
                                        const std::string& what) const {
  const base::MutexLock lock(pair.comm_mutex);
  const char* const last = pair.comm_gone ? nullptr : lanes_.nccl().get_last_error(pair.comm);
  return Error(ErrorCode::internal,
               "NCCL between device " + std::to_string(pair.name.source_device) + " and device " +
                   std::to_string(pair.name.destination_device) + ": " + what + ": " +
                   lanes_.nccl().get_error_string(result) + (last == nullptr ? "" : ": ") +
                   (last == nullptr ? "" : last));
}

DeviceTransfers::Impl::PairPtr DeviceTransfers::Impl::find_pair(PeerId peer, End end,
                                                                const PairName& name) const {
  const auto at = slots_.find({peer, end, name.source_device, name.destination_device});
  if (at == slots_.end() || at->second.pair == nullptr) return nullptr;
  return at->second.pair->name == name ? at->second.pair : nullptr;
}

// --- opening ---

// To make a communicator NCCL initializes CUDA and allocates, also where it does not block for its
// peer: that may wait for the device, and the device for a transfer that a time limit has to end,
// which the connector looks at.
void DeviceTransfers::Impl::open_pair(const PairPtr& pair) {
  const auto deadline = base::deadline_after(options_.open_timeout);
  {
    const base::MutexLock lock(mutex_);
    if (pair->state == NcclPair::State::broken) return;
    pair->being_made = true;
  }
  const auto in_time = std::make_shared<bool>(false);
  const bool begun = lanes_.run_apart(
      pair->lane->device(),
      [self = shared_from_this(), pair, in_time] { *in_time = self->make_comm(pair); },
      [self = shared_from_this(), pair, in_time, deadline] {
        if (!*in_time) {
          pair->lane->post([self, pair] { self->retired(pair); });
          return;
        }
        self->lanes_.connector().post(
            self->on_lane(pair, [self, pair, deadline] { self->comm_made(pair, deadline); }));
      });
  if (!begun) {
    {
      const base::MutexLock lock(mutex_);
      pair->being_made = false;
    }
    const Error why(ErrorCode::overloaded, "the system gives no thread to open a communicator");
    return break_pair(pair, why, true);
  }
  lanes_.connector().post_at(deadline, on_lane(pair, [self = shared_from_this(), pair] {
                               {
                                 const base::MutexLock lock(self->mutex_);
                                 if (!pair->being_made) return;
                               }
                               const Error why(ErrorCode::internal,
                                               "NCCL does not make a communicator in time");
                               self->break_pair(pair, why, true);
                             }));
}

bool DeviceTransfers::Impl::make_comm(const PairPtr& pair) {
  const NcclApi& nccl = lanes_.nccl();
  guarded(pair, [&] {
    pair->made = nccl::kSystemError;
    if (begin_own_thread(lanes_.cuda(), pair->lane->device()) != cuda::kSuccess) {
      pair->made = nccl::kUnhandledCudaError;
      return;
    }
    if (pair->end == End::source) {
      pair->made = nccl.get_unique_id(&pair->unique_id);
      if (pair->made != nccl::kSuccess || broken(*pair)) return;
      send_frame(pair->peer, encode(CommOpenFrame{pair->name, lanes_.nccl_version(),
                                                  pair->piece_bytes, pair->unique_id}));
    }
    nccl::Config config;
    config.blocking = 0;
    config.min_ctas = 1;
    config.max_ctas = 8;
    config.cga_cluster_size = 0;
    pair->made = nccl.comm_init_rank_config(&pair->comm, 2, pair->unique_id,
                                            pair->end == End::source ? 0 : 1, &config);
  });
  {
    const base::MutexLock lock(mutex_);
    if (pair->state != NcclPair::State::broken) {
      pair->being_made = false;
      return true;
    }
  }
  if (pair->comm != nullptr) (void)nccl.comm_abort(pair->comm);
  const base::MutexLock lock(mutex_);
  pair->being_made = false;
  pair->aborted = true;
  return false;
}

void DeviceTransfers::Impl::comm_made(const PairPtr& pair, Clock::time_point deadline) {
  if (broken(*pair)) return;
  if (pair->made != nccl::kSuccess && pair->made != nccl::kInProgress)
    return break_pair(pair, nccl_error(*pair, pair->made, "cannot be opened"), true);
  poll_opening(pair, deadline);
}

void DeviceTransfers::Impl::poll_opening(const PairPtr& pair, Clock::time_point deadline) {
  if (broken(*pair)) return;
  nccl::Result state = nccl::kSuccess;
  const nccl::Result asked = lanes_.nccl().comm_get_async_error(pair->comm, &state);
  if (asked != nccl::kSuccess) state = asked;
  if (state == nccl::kSuccess) {
    {
      const base::MutexLock lock(mutex_);
      pair->initialized = true;
    }
    order_if_ready(pair);
    // Until the other end is ready, the communicator stays the connector's.
    const base::MutexLock lock(mutex_);
    if (pair->ordered) return;
  } else if (state != nccl::kInProgress) {
    break_pair(pair, nccl_error(*pair, state, "cannot be opened"), true);
  }
  if (Clock::now() >= deadline) {
    break_pair(pair, nccl_error(*pair, state, "is not open in time"), true);
  }
  lanes_.connector().post_at(Clock::now() + kPollInterval,
                             on_lane(pair, [self = shared_from_this(), pair, deadline] {
                               self->poll_opening(pair, deadline);
                             }));
}

// The connector's last step with a pair: from here on, the lane uses the communicator.
void DeviceTransfers::Impl::order_if_ready(const PairPtr& pair) {
  {
    const base::MutexLock lock(mutex_);
    if (pair->state != NcclPair::State::opening || !pair->initialized) return;
    if (pair->end == End::source && !pair->peer_ready) return;
    std::uint64_t source = uid_;
    if (pair->end == End::destination) {
      const auto& hello = peers_[pair->peer].hello;
      if (!hello) return;  // on its way; asked again
      source = hello->uid;
    }
    pair->state = NcclPair::State::testing;
    pair->ordered = true;
    ordered_.emplace(pair->token, pair);
    pair->lane->add_pair(pair->token, pair->end, source,
                         [self = shared_from_this(), pair](std::uint64_t number) -> Lane::Watch {
                           try {
                             return self->launch(pair, number);
                           } catch (...) {
                             self->not_launched(pair, number, to_error(std::current_exception()));
                             return nullptr;
                           }
                         });
  }
  if (pair->end == End::destination) {
    send_frame(pair->peer, encode(CommReadyFrame{pair->name}));
  } else {
    pair->lane->post(on_lane(pair, [self = shared_from_this(), pair] { self->begin_test(pair); }));
  }
}

void DeviceTransfers::Impl::on_comm_open(PeerId from, const CommOpenFrame& frame) {
  std::string refused;
  const auto device = static_cast<int>(frame.pair.destination_device);
  if (device >= lanes_.device_count()) {
    throw Error(ErrorCode::protocol, "COMM_OPEN frame names device " + std::to_string(device) +
                                         ", this process has " +
                                         std::to_string(lanes_.device_count()));
  }
  if (frame.piece_bytes < kMinPieceBytes || frame.piece_bytes > kMaxPieceBytes) {
    throw Error(ErrorCode::protocol,
                "COMM_OPEN frame has pieces of " + std::to_string(frame.piece_bytes) + " bytes");
  }
  const int version = own_nccl();
  if (!nccl_versions_match(version, frame.nccl_version)) {
    refused = "NCCL versions do not match: " + std::to_string(frame.nccl_version) + " and " +
              std::to_string(version);
  } else if (lanes_.quarantined(device)) {
    refused = "device " + std::to_string(device) + " does not use NCCL after an abort that hung";
  }
  Lane* lane = nullptr;
  try {
    if (refused.empty()) lane = &lanes_.lane(device);
  } catch (const Error& error) {
    refused = error.what();  // no thread for it
  }
  PairPtr pair;
  PairPtr before;
  std::vector<PairPtr> ended;  // without the lock
  {
    const base::MutexLock lock(mutex_);
    const auto& hello = peers_[from].hello;
    if (hello && frame.pair.source_device >= hello->device_uuids.size()) {
      throw Error(ErrorCode::protocol,
                  "COMM_OPEN frame is of device " + std::to_string(frame.pair.source_device) +
                      ", its sender has " + std::to_string(hello->device_uuids.size()));
    }
    PairSlot& slot =
        slots_[{from, End::destination, frame.pair.source_device, frame.pair.destination_device}];
    if (closing_ || frame.pair.epoch <= slot.epoch) return;
    slot.epoch = frame.pair.epoch;
    before = slot.pair;
    const auto going_on = std::partition(slot.accepted.begin(), slot.accepted.end(),
                                         [](const PairPtr& each) { return !each->aborted; });
    ended.assign(std::make_move_iterator(going_on), std::make_move_iterator(slot.accepted.end()));
    slot.accepted.erase(going_on, slot.accepted.end());
    if (refused.empty() && slot.accepted.size() >= kMaxUnfinished)
      refused = std::to_string(kMaxUnfinished) + " communicators of this name are being aborted";
    if (refused.empty()) {
      pair = std::make_shared<NcclPair>();
      pair->name = frame.pair;
      pair->peer = from;
      pair->end = End::destination;
      pair->token = lanes_.new_pair();
      pair->lane = lane;
      pair->piece_bytes = frame.piece_bytes;
      pair->unique_id = frame.unique_id;
      slot.accepted.push_back(pair);
    }
  }
  if (before != nullptr) {
    break_pair(before, Error(ErrorCode::internal, "replaced by the peer"), false);
  }
  if (pair == nullptr) {
    send_frame(from, encode(CommBreakFrame{frame.pair, 0, refused}));
    return;
  }
  {
    const base::MutexLock lock(mutex_);
    if (closing_ || peers_[from].lost) return;
    slots_[{from, End::destination, frame.pair.source_device, frame.pair.destination_device}].pair =
        pair;
  }
  lanes_.connector().post(
      on_lane(pair, [self = shared_from_this(), pair] { self->open_pair(pair); }));
}

void DeviceTransfers::Impl::on_comm_ready(PeerId from, const CommReadyFrame& frame) {
  const base::MutexLock lock(mutex_);
  if (const PairPtr pair = find_pair(from, End::source, frame.pair)) pair->peer_ready = true;
}

// --- test ---

void DeviceTransfers::Impl::begin_test(const PairPtr& pair) {
  if (broken(*pair)) return;
  const auto [clock, held] = pair->lane->announce(pair->token, 0);
  if (!clock) {
    if (!held) return;
    lanes_.connector().post_at(base::deadline_after(kPollInterval),
                               [self = shared_from_this(), pair] {
                                 pair->lane->post([self, pair] { self->begin_test(pair); });
                               });
    return;
  }
  start_ticking();
  RtsFrame rts;
  rts.path = Path::nccl;
  rts.pair = pair->name;
  rts.clock = *clock;
  send_frame(pair->peer, encode(rts));
}

void DeviceTransfers::Impl::on_test_finished(PeerId from, const FinishedFrame& frame) {
  const base::MutexLock lock(mutex_);
  const PairPtr pair = find_pair(from, End::source, frame.pair);
  if (pair == nullptr || pair->state != NcclPair::State::testing || frame.failed != 0) return;
  pair->state = NcclPair::State::open;
}

// --- breaking ---

void DeviceTransfers::Impl::on_comm_break(PeerId from, const CommBreakFrame& frame) {
  const End end = frame.from_source != 0 ? End::destination : End::source;
  PairPtr pair;
  {
    const base::MutexLock lock(mutex_);
    pair = find_pair(from, end, frame.pair);
    if (pair == nullptr && end == End::destination) {
      // It may be before its COMM_OPEN.
      PairSlot& slot = slots_[{from, end, frame.pair.source_device, frame.pair.destination_device}];
      if (slot.pair == nullptr) slot.epoch = std::max(slot.epoch, frame.pair.epoch);
    }
  }
  if (pair != nullptr) {
    end_pair(pair, Error(ErrorCode::internal, frame.text).with_remote(true), false,
             frame.text.empty());
  }
}

void DeviceTransfers::Impl::break_pair(const PairPtr& pair, const Error& why, bool tell) {
  end_pair(pair, why, tell, false);
}

void DeviceTransfers::Impl::close_unused(const PairPtr& pair) {
  end_pair(pair, Error(ErrorCode::cancelled, ""), true, true);
}

bool DeviceTransfers::Impl::has_room(const Lane& lane, PairPtr& unused) const {
  std::size_t count = 0;
  const auto before = Clock::now() - options_.unused_time;
  for (const auto& [key, slot] : slots_) {
    if (std::get<1>(key) != End::source || slot.pair == nullptr || slot.pair->lane != &lane)
      continue;
    ++count;
    const PairPtr& pair = slot.pair;
    if (pair->state != NcclPair::State::open || pair->used > before) continue;
    const bool in_use = !pair->launched.empty() ||
                        std::any_of(outgoing_.begin(), outgoing_.end(), [&pair](const auto& each) {
                          return each.second->pair == pair;
                        });
    if (!in_use && (unused == nullptr || pair->used < unused->used)) unused = pair;
  }
  if (count >= options_.max_communicators) return unused != nullptr;
  unused.reset();
  return true;
}

void DeviceTransfers::Impl::end_pair(const PairPtr& pair, const Error& why, bool tell,
                                     bool unused) {
  bool ordered = false;
  std::vector<std::uint64_t> left;
  {
    const base::MutexLock lock(mutex_);
    if (pair->state == NcclPair::State::broken) return;
    pair->state = NcclPair::State::broken;
    pair->why = why;
    if (!unused) ++breaks_;
    ordered = pair->ordered;
    const auto slot = slots_.find(
        {pair->peer, pair->end, pair->name.source_device, pair->name.destination_device});
    if (slot != slots_.end() && slot->second.pair == pair) {
      slot->second.pair.reset();
      if (!unused) slot->second.pause.failure(options_.reopen_backoff);
      if (!unused && pair->end == End::source && !closing_ && !peers_[pair->peer].lost)
        path_failed(pair->peer, pair->lane->device(), Path::nccl, why.what());
    }
    if (ordered) {
      left = pair->lane->drop_pair(pair->token);
      auto node = ordered_.extract(pair->token);
      if (!node.empty() && !pair->launched.empty()) retiring_.insert(std::move(node));
    }
    tell = tell && !peers_[pair->peer].lost;
  }
  if (tell) {
    send_frame(
        pair->peer,
        encode(CommBreakFrame{
            pair->name, pair->end == End::source ? std::uint8_t{1} : std::uint8_t{0}, why.what()}));
  }
  for (const std::uint64_t number : left) leave_pair(pair, number);
  if (ordered) {
    retire(pair);
  } else {
    lanes_.connector().post([self = shared_from_this(), pair] { self->retire(pair); });
  }
}

// A transfer of a broken pair that nothing on this device works on.
void DeviceTransfers::Impl::leave_pair(const PairPtr& pair, std::uint64_t number) {
  if (number == 0) return;
  if (pair->end == End::destination) {
    IncomingPtr transfer;
    {
      const base::MutexLock lock(mutex_);
      transfer = find_incoming(pair->peer, number);
      // It may have been cancelled since, and its id used again.
      if (transfer != nullptr && transfer->pair != pair) transfer = nullptr;
    }
    if (transfer != nullptr) retry(transfer);
    return;
  }
  OutgoingPtr transfer;
  {
    const base::MutexLock lock(mutex_);
    transfer = find_outgoing(pair->peer, number);
    if (transfer == nullptr) return;
    transfer->reading = false;
  }
  end_if_settled(transfer);
}

void DeviceTransfers::Impl::retire(const PairPtr& pair) {
  {
    const base::MutexLock lock(pair->comm_mutex);
    pair->comm_gone = true;
  }
  bool being_made = false;
  {
    const base::MutexLock lock(mutex_);
    being_made = pair->being_made;
    if (!being_made && !pair->aborted && pair->comm == nullptr)
      pair->aborted = true;  // there is none
    if (pair->aborted) {
      retiring_.erase(pair->token);
      return;
    }
  }
  lanes_.connector().post_at(base::deadline_after(options_.abort_timeout),
                             [self = shared_from_this(), pair] { self->on_abort_stuck(pair); });
  if (!being_made) abort(pair);  // else make_comm() does
}

void DeviceTransfers::Impl::abort(const PairPtr& pair) {
  const bool begun =
      lanes_.abort(pair->comm, pair->lane->device(), [self = shared_from_this(), pair] {
        {
          const base::MutexLock lock(self->mutex_);
          pair->aborted = true;
          if (self->retiring_.erase(pair->token) > 0)
            self->extend_deadlines(*pair->lane, pair->end);
        }
        pair->lane->post([self, pair] { self->retired(pair); });
      });
  if (begun) return;
  lanes_.connector().post_at(base::deadline_after(kAbortAgain),
                             [self = shared_from_this(), pair] { self->abort(pair); });
}

// The kernels have been told to end; the events say when they have.
void DeviceTransfers::Impl::retired(const PairPtr& pair) {
  Lane& lane = *pair->lane;
  const cuda::Stream stream = pair->end == End::source ? lane.sends() : lane.receives();
  lane.when_done(stream, [self = shared_from_this(), pair](cuda::Status) {
    std::map<std::uint64_t, NcclPair::Launched> launched;
    {
      const base::MutexLock lock(self->mutex_);
      launched.swap(pair->launched);
    }
    for (const auto& [number, entry] : launched) {
      pair->lane->finish(pair->token);
      self->leave_pair(pair, number);
    }
    if (pair->test_memory != nullptr) (void)self->lanes_.cuda().free(pair->test_memory);
    if (pair->test_bytes != nullptr) (void)self->lanes_.cuda().free_host(pair->test_bytes);
    pair->test_memory = nullptr;
    pair->test_bytes = nullptr;
  });
}

void DeviceTransfers::Impl::on_abort_stuck(const PairPtr& pair) {
  std::map<std::uint64_t, NcclPair::Launched> launched;
  {
    const base::MutexLock lock(mutex_);
    if (pair->aborted) return;
    retiring_.erase(pair->token);
    launched = pair->launched;  // whose memory stays with the pair
  }
  lanes_.quarantine(pair->lane->device());
  const Error why(ErrorCode::internal, "device " + std::to_string(pair->lane->device()) +
                                           " does not use NCCL after an abort that hung");
  {
    const base::MutexLock lock(mutex_);
    say(pair->peer, kQuarantine,
        {why.what(), "; it broke by: ", pair->why ? pair->why->what() : "nothing"});
  }
  for (const auto& [number, entry] : launched) {
    if (number == 0) continue;
    OutgoingPtr outgoing;
    IncomingPtr incoming;
    {
      const base::MutexLock lock(mutex_);
      if (pair->end == End::source) {
        outgoing = find_outgoing(pair->peer, number);
      } else {
        incoming = find_incoming(pair->peer, number);
        if (incoming != nullptr && incoming->pair != pair) incoming = nullptr;
      }
    }
    if (outgoing != nullptr) cancel(outgoing, why);
    if (incoming != nullptr) finish(incoming, why);
  }
}

}  // namespace stitch::transport::gpu
