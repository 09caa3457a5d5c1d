// What a transfer goes through whatever its path, and the frames that say so.

#include <algorithm>
#include <string>
#include <utility>

#include "stitch/base/random.h"
#include "stitch/transport/gpu/device_transfers_impl.h"

namespace stitch::transport::gpu {
namespace {

[[noreturn]] void unexpected(const char* frame, TransferId id) {
  throw Error(ErrorCode::protocol, std::string(frame) + " frame for transfer " +
                                       std::to_string(id) + ", which does not wait for one");
}

}  // namespace

DeviceTransfers::Impl::OutgoingPtr DeviceTransfers::Impl::find_outgoing(PeerId to,
                                                                        TransferId id) const {
  const auto at = outgoing_.find(id);
  return at == outgoing_.end() || at->second->to != to ? nullptr : at->second;
}

DeviceTransfers::Impl::IncomingPtr DeviceTransfers::Impl::find_incoming(PeerId from,
                                                                        TransferId id) const {
  const auto at = incoming_.find({from, id});
  return at == incoming_.end() ? nullptr : at->second;
}

// --- source ---

PathChoice DeviceTransfers::Impl::choose(const Outgoing& transfer) {
  const auto& hello = peers_[transfer.to].hello;
  const auto to_device = static_cast<std::size_t>(transfer.to_device);
  if (transfer.retried || !hello || to_device >= hello->device_uuids.size()) return {};
  const int device = transfer.source.device;
  const PathEnd source{options_.identity, lanes_.uuids()[static_cast<std::size_t>(device)], device,
                       own_nccl()};
  const PathEnd destination{hello->process, hello->device_uuids[to_device], transfer.to_device,
                            hello->nccl_version};
  const PairSlot& slot = slots_[{transfer.to, End::source, static_cast<std::uint32_t>(device),
                                 static_cast<std::uint32_t>(to_device)}];
  const PathState peer = options_.use_peer && source.process == destination.process
                             ? lanes_.peer_state(device, transfer.to_device)
                             : PathState::closed;
  const PathChoice choice =
      choose_path(source, destination, {peer, nccl_state(slot, device)}, transfer.source.bytes);
  if (choice.versions_differ && options_.use_nccl) say_versions(transfer.to, hello->nccl_version);
  return choice;
}

void DeviceTransfers::Impl::begin(const OutgoingPtr& transfer) {
  if (transfer->lane->failure()) return cancel(transfer, *transfer->lane->failure());
  PathChoice choice;
  PairPtr pair;
  PairPtr to_open;
  PairPtr unused;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->ended) return;
    choice = choose(*transfer);
    PairSlot& slot =
        slots_[{transfer->to, End::source, static_cast<std::uint32_t>(transfer->source.device),
                static_cast<std::uint32_t>(transfer->to_device)}];
    pair = slot.pair;
    if (choice.open_nccl && !closing_ && !peers_[transfer->to].lost &&
        has_room(*transfer->lane, unused)) {
      to_open = std::make_shared<NcclPair>();
      to_open->name = {static_cast<std::uint32_t>(transfer->source.device),
                       static_cast<std::uint32_t>(transfer->to_device), ++slot.epoch};
      to_open->peer = transfer->to;
      to_open->end = End::source;
      to_open->token = lanes_.new_pair();
      to_open->lane = transfer->lane;
      to_open->piece_bytes = options_.nccl_piece_bytes;
      to_open->used = Clock::now();
      slot.pair = to_open;
    }
  }
  if (unused != nullptr) close_unused(unused);
  if (to_open != nullptr) {
    lanes_.connector().post(
        on_lane(to_open, [self = shared_from_this(), to_open] { self->open_pair(to_open); }));
  }
  if (choice.test_peer)
    test_peer_copies(transfer->to, transfer->source.device, transfer->to_device);
  if (choice.path == Path::nccl && announce_nccl(transfer, pair)) return;
  if (choice.path == Path::nccl) choice.path = Path::staging;  // it has broken in the meantime
  {
    const base::MutexLock lock(mutex_);
    if (transfer->ended) return;
    transfer->path = choice.path;
    transfer->announced = true;
  }
  std::uint64_t key = 0;
  if (choice.path == Path::local || choice.path == Path::peer) {
    key = base::random_number();
    lanes_.offer(uid_, transfer->id,
                 {transfer->source.device, transfer->source.data, transfer->source.bytes,
                  transfer->keep_alive, key});
    bool ended = false;
    {
      const base::MutexLock lock(mutex_);
      ended = transfer->ended;
    }
    if (ended) {  // in the meantime: what ended it has not seen the offer
      lanes_.withdraw(uid_, transfer->id);
      return;
    }
  }
  RtsFrame rts;
  rts.id = transfer->id;
  rts.path = choice.path;
  rts.pair = {static_cast<std::uint32_t>(transfer->source.device),
              static_cast<std::uint32_t>(transfer->to_device), 0};
  rts.bytes = transfer->source.bytes;
  rts.clock = key;
  send_frame(transfer->to, encode(rts));
}

void DeviceTransfers::Impl::on_retry(PeerId from, TransferId id, const char* frame) {
  OutgoingPtr transfer;
  PairPtr pair;
  {
    const base::MutexLock lock(mutex_);
    transfer = find_outgoing(from, id);
    if (transfer == nullptr) return;
    if (!transfer->announced || transfer->retried || transfer->path == Path::staging) {
      unexpected(frame, id);
    }
    transfer->retried = true;
    transfer->finished.reset();
    transfer->granted = 0;
    transfer->data_sent = 0;
    pair = std::exchange(transfer->pair, nullptr);
    ++retries_;
  }
  // The destination retries what a broken pair had; its BREAK may be behind.
  if (pair != nullptr) break_pair(pair, Error(ErrorCode::internal, "broken by the peer"), false);
  lanes_.withdraw(uid_, transfer->id);
  transfer->lane->post(on_lane(transfer, [self = shared_from_this(), transfer] {
    transfer->offset = 0;
    self->begin(transfer);
  }));
}

void DeviceTransfers::Impl::on_finished(PeerId from, const FinishedFrame& frame) {
  if (frame.id == 0) return on_test_finished(from, frame);
  OutgoingPtr transfer;
  {
    const base::MutexLock lock(mutex_);
    transfer = find_outgoing(from, frame.id);
    if (transfer != nullptr) {
      if (!transfer->announced || transfer->finished) unexpected("FINISHED", frame.id);
      transfer->finished = frame;
      // Without a CTS before it: its destination has not entered it.
      const PairPtr& pair = transfer->pair;
      if (frame.failed != 0 && pair != nullptr && pair->lane->withdraw(pair->token, frame.id)) {
        transfer->pair.reset();
        transfer->reading = false;
      }
    }
  }
  // It was cancelled here: its CANCEL comes to a destination that knows it no more.
  if (transfer == nullptr) return send_frame(from, encode(ForgetFrame{frame.id}));
  end_if_settled(transfer);
}

void DeviceTransfers::Impl::end_if_settled(const OutgoingPtr& transfer) {
  std::optional<Error> error;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->ended || !transfer->finished || transfer->reading) return;
    if (transfer->finished->failed != 0) {
      error = Error(ErrorCode::internal, transfer->finished->text).with_remote(true);
    }
  }
  end(transfer, std::move(error));
}

// --- destination ---

void DeviceTransfers::Impl::on_rts(PeerId from, const RtsFrame& frame) {
  if (frame.id == 0) return accept_test(from, frame);
  IncomingPtr transfer;
  std::optional<Error> refused;
  bool named = false;
  {
    const base::MutexLock lock(mutex_);
    Peer& peer = peers_[from];
    auto fresh = std::make_shared<Incoming>();  // first: no entry is ever null
    IncomingPtr& entry = incoming_[{from, frame.id}];
    const bool unknown = entry == nullptr;
    if (unknown) {
      entry = std::move(fresh);
      entry->from = from;
      entry->id = frame.id;
    }
    if (entry->rts || (entry->retried && frame.path != Path::staging)) unexpected("RTS", frame.id);
    entry->rts = frame;
    transfer = entry;
    refused = transfer->refused;
    if (refused) --peer.unasked;
    named = transfer->wanted;
    if (!refused && !named && unknown) check_unasked(peer);
  }
  start_watching();
  if (refused) {
    finish(transfer, refused);
  } else if (named) {
    start(transfer);
  }
}

void DeviceTransfers::Impl::start(const IncomingPtr& transfer) {
  RtsFrame rts;
  std::optional<Error> error;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->ended || !transfer->rts || std::exchange(transfer->started, true)) return;
    rts = *transfer->rts;
    if (rts.bytes != transfer->bytes ||
        rts.pair.destination_device != static_cast<std::uint32_t>(transfer->lane->device())) {
      error.emplace(ErrorCode::protocol,
                    "transfer " + std::to_string(transfer->id) + " is announced with " +
                        std::to_string(rts.bytes) + " bytes for device " +
                        std::to_string(rts.pair.destination_device) + ", its message says " +
                        std::to_string(transfer->bytes) + " bytes for device " +
                        std::to_string(transfer->lane->device()));
    }
  }
  if (error) return finish(transfer, error);
  if (rts.path == Path::nccl) return start_nccl(transfer, rts);
  transfer->lane->post(
      on_lane(transfer, [self = shared_from_this(), transfer, path = rts.path, key = rts.clock] {
        if (path == Path::staging) {
          self->start_staged(transfer);
        } else {
          self->start_local(transfer, key);
        }
      }));
}

bool DeviceTransfers::Impl::allocate(const IncomingPtr& transfer, cuda::Stream stream) {
  if (transfer->memory.data != nullptr) return true;  // of an earlier attempt
  Allocate allocate;
  std::size_t bytes = 0;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->ended) return false;
    allocate = std::move(transfer->allocate);
    transfer->allocate = nullptr;
    bytes = transfer->bytes;
  }
  Lane& lane = *transfer->lane;
  std::string reason = "no memory";
  if (lane.failure()) {
    // Nothing is asked of it.
  } else if (const CallOut call(*this); call && allocate) {
    (void)lanes_.cuda().get_last_error();  // of a call of ours; what it finds is its own
    try {
      transfer->memory = allocate(lane.device(), bytes, stream);
    } catch (...) {
      reason = describe(std::current_exception());
    }
    (void)lanes_.cuda().set_device(lane.device());
  }
  if (transfer->memory.data != nullptr) return true;
  lane.find_failure();
  if (lane.failure()) {
    transfer->no_memory = *lane.failure();
    return false;
  }
  transfer->no_memory.emplace(ErrorCode::overloaded,
                              "device " + std::to_string(lane.device()) + ": " +
                                  std::to_string(bytes) +
                                  " bytes to receive into cannot be allocated: " + reason);
  return false;
}

void DeviceTransfers::Impl::retry(const IncomingPtr& transfer, bool held) {
  if (transfer->no_memory) return finish(transfer, transfer->no_memory);
  std::optional<RtsFrame> rts;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->ended) return;
    rts = std::exchange(transfer->rts, std::nullopt);
    transfer->pair.reset();
    transfer->started = false;
    transfer->retried = true;
  }
  try {
    send_frame(transfer->from,
               held ? encode(DeclineFrame{transfer->id}) : encode(RetryFrame{transfer->id}));
  } catch (...) {  // its source still waits for an answer to that
    const base::MutexLock lock(mutex_);
    transfer->rts = rts;
    throw;
  }
}

void DeviceTransfers::Impl::on_cancel(PeerId from, const CancelFrame& frame) {
  const bool known = frame.code >= static_cast<std::uint8_t>(ErrorCode::invalid_argument) &&
                     frame.code <= static_cast<std::uint8_t>(ErrorCode::internal);
  const Error why =
      Error(known ? static_cast<ErrorCode>(frame.code) : ErrorCode::internal, frame.text)
          .with_remote(true);
  IncomingPtr transfer;
  PairPtr pair;
  {
    const base::MutexLock lock(mutex_);
    auto fresh = std::make_shared<Incoming>();
    IncomingPtr& entry = incoming_[{from, frame.id}];
    if (entry == nullptr) {
      entry = std::move(fresh);
      entry->from = from;
      entry->id = frame.id;
      check_unasked(peers_[from]);
    }
    if (entry->refused) {
      --peers_[from].unasked;
      incoming_.erase({from, frame.id});
      return;
    }
    if (!entry->wanted) {
      entry->cancelled = why;  // receive() will say so
      return;
    }
    transfer = entry;
    pair = transfer->pair;
  }
  if (pair != nullptr) break_pair(pair, why, true);
  end(transfer, why);
}

void DeviceTransfers::Impl::on_forget(PeerId from, const ForgetFrame& frame) {
  const base::MutexLock lock(mutex_);
  const auto at = incoming_.find({from, frame.id});
  if (at == incoming_.end() || at->second->wanted || !at->second->cancelled) return;
  --peers_[from].unasked;
  incoming_.erase(at);
}

void DeviceTransfers::Impl::check_unasked(Peer& peer) {
  if (++peer.unasked > options_.max_transfers_per_peer) {
    throw Error(ErrorCode::protocol,
                "peer announces more than " + std::to_string(options_.max_transfers_per_peer) +
                    " transfers that no message has named or that were refused");
  }
}

}  // namespace stitch::transport::gpu
