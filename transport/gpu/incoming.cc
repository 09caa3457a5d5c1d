#include "stitch/transport/gpu/incoming.h"

#include <string>
#include <utility>
#include <vector>

#include "stitch/transport/gpu/transfers.h"

namespace stitch::transport::gpu {

Incoming::~Incoming() {
  if (lane != nullptr) lane->post([owner = std::move(memory.owner)] {});
}

IncomingPtr IncomingTransfers::find(PeerId from, TransferId id) const {
  const base::MutexLock lock(mutex_);
  const auto at = table_.find({from, id});
  return at == table_.end() ? nullptr : at->second;
}

void IncomingTransfers::add_to(DeviceTransfers::Counters& counters) const {
  const base::MutexLock lock(mutex_);
  counters.incoming = table_.size();
}

// --- receive() and RTS ---

IncomingPtr& IncomingTransfers::claim(PeerId from, TransferId id) {
  IncomingPtr& entry = table_[{from, id}];
  if (entry == nullptr) {
    entry = std::make_shared<Incoming>(from, id);
  } else if (entry->state != Incoming::State::unclaimed || entry->refused) {
    throw Error(ErrorCode::protocol,
                "transfer " + std::to_string(id) + " is received a second time");
  } else {
    --unclaimed_[from];
  }
  return entry;
}

void IncomingTransfers::count_unclaimed(PeerId from) {
  const std::size_t limit = transfers_.options().max_transfers_per_peer;
  if (++unclaimed_[from] <= limit) return;
  throw Error(ErrorCode::protocol, "peer announces more than " + std::to_string(limit) +
                                       " transfers that no message has named or that were refused");
}

void IncomingTransfers::receive(PeerId from, TransferId id, int device, std::size_t bytes,
                                DeviceTransfers::Allocate allocate,
                                DeviceTransfers::Arrived arrived, DeviceTransfers::Adopt adopt) {
  Lane& lane = transfers_.lanes().lane(device);
  IncomingPtr transfer;
  std::optional<Error> refused;
  bool announced = false;
  {
    const base::MutexLock lock(mutex_);
    transfer = claim(from, id);
    transfer->state = Incoming::State::claimed;
    transfer->lane = &lane;
    transfer->bytes = bytes;
    transfer->allocate = std::move(allocate);
    transfer->adopt = std::move(adopt);
    transfer->arrived = std::move(arrived);
    announced = transfer->rts.has_value();
    refused = transfers_.begin_transfer(from);
    if (!refused) refused = transfer->cancelled;
  }
  if (refused) {
    lane.post([this, self = transfers_.self(), transfer, refused] { finish(transfer, refused); });
  } else if (announced) {
    start(transfer);
  }
}

void IncomingTransfers::refuse(PeerId from, TransferId id, const Error& why) {
  if (transfers_.refusal(from)) return;
  IncomingPtr transfer;
  {
    const base::MutexLock lock(mutex_);
    transfer = claim(from, id);
    transfer->refused = why;
    if (transfer->cancelled) {
      table_.erase({from, id});
      return;
    }
    if (!transfer->rts) return count_unclaimed(from);  // RTS gets the answer
  }
  finish(transfer, why);
}

void IncomingTransfers::on_rts(PeerId from, const RtsFrame& frame) {
  IncomingPtr transfer;
  std::optional<Error> refused;
  bool claimed = false;
  {
    const base::MutexLock lock(mutex_);
    IncomingPtr& entry = table_[{from, frame.id}];
    const bool unknown = entry == nullptr;
    if (unknown) entry = std::make_shared<Incoming>(from, frame.id);
    if (entry->rts || (entry->retried && frame.path != Path::staging)) {
      throw Error(ErrorCode::protocol, "RTS frame for transfer " + std::to_string(frame.id) +
                                           ", which does not wait for one");
    }
    entry->rts = frame;
    transfer = entry;
    refused = transfer->refused;
    claimed = transfer->state == Incoming::State::claimed;
    if (refused) {
      --unclaimed_[from];
    } else if (unknown) {
      count_unclaimed(from);
    }
  }
  if (refused) {
    finish(transfer, refused);
  } else if (claimed) {
    start(transfer);
  }
}

void IncomingTransfers::on_data(PeerId from, const DataFrame& frame) {
  if (const IncomingPtr transfer = find(from, frame.id))
    transfers_.staging().on_data(transfer, frame);
}

// --- the path ---

void IncomingTransfers::start(const IncomingPtr& transfer) {
  RtsFrame rts;
  const auto device = static_cast<std::uint32_t>(transfer->lane->device());
  {
    const base::MutexLock lock(mutex_);
    if (transfer->state != Incoming::State::claimed || !transfer->rts) return;
    transfer->state = Incoming::State::started;
    rts = *transfer->rts;
  }
  if (rts.bytes != transfer->bytes || rts.pair.destination_device != device) {
    return finish(
        transfer,
        Error(ErrorCode::protocol,
              "transfer " + std::to_string(transfer->id) + " is announced with " +
                  std::to_string(rts.bytes) + " bytes for device " +
                  std::to_string(rts.pair.destination_device) + ", its message says " +
                  std::to_string(transfer->bytes) + " bytes for device " + std::to_string(device)));
  }
  if (rts.path == Path::nccl) return start_nccl(transfer, rts);
  transfer->lane->post(
      [this, self = transfers_.self(), transfer, path = rts.path, key = rts.clock] {
        if (path == Path::staging) {
          transfers_.staging().start(transfer);
        } else {
          transfers_.local_copies().start(transfer, key);
        }
      });
}

// Without a call of CUDA: the source gets its answer whatever the device does.
void IncomingTransfers::start_nccl(const IncomingPtr& transfer, const RtsFrame& rts) {
  Communicators::Entered entered;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->state == Incoming::State::ended) return;
    entered = transfers_.communicators().accept(transfer->from, rts);
    transfer->pair = entered.pair;
  }
  if (entered.pair == nullptr) return retry(transfer);
  transfers_.send_frame(transfer->from, encode(CtsFrame{rts.id, rts.pair, entered.clock}));
}

bool IncomingTransfers::allocate(const IncomingPtr& transfer, cuda::Stream stream) {
  if (transfer->memory.data != nullptr) return true;  // of an earlier attempt
  DeviceTransfers::Allocate allocate;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->state == Incoming::State::ended) return false;
    allocate = std::exchange(transfer->allocate, nullptr);
  }
  Lane& lane = *transfer->lane;
  const std::size_t bytes = transfer->bytes;
  std::string reason = "no memory";
  if (allocate)
    transfer->memory = transfers_.allocate(lane, std::move(allocate), bytes, stream, reason);
  if (transfer->memory.data != nullptr) return true;
  lane.find_failure();
  transfer->no_memory =
      lane.failure()
          ? *lane.failure()
          : Error(ErrorCode::overloaded,
                  "device " + std::to_string(lane.device()) + ": " + std::to_string(bytes) +
                      " bytes to receive into cannot be allocated: " + reason);
  return false;
}

bool IncomingTransfers::adopt(const IncomingPtr& transfer,
                              const std::shared_ptr<const void>& owner) {
  DeviceTransfers::Adopt adopt;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->state == Incoming::State::ended) return false;
    adopt = std::exchange(transfer->adopt, nullptr);
  }
  if (!adopt || !transfers_.begin_call()) return false;
  (void)transfers_.lanes().cuda().get_last_error();  // as in Transfers::allocate()
  const bool taken = adopt(owner);
  adopt = nullptr;
  transfers_.end_call();
  return taken;
}

void IncomingTransfers::retry(const IncomingPtr& transfer) {
  if (transfer->no_memory) return finish(transfer, transfer->no_memory);
  {
    const base::MutexLock lock(mutex_);
    if (transfer->state == Incoming::State::ended) return;
    transfer->state = Incoming::State::claimed;
    transfer->rts.reset();
    transfer->pair.reset();
    transfer->retried = true;
  }
  transfers_.send_frame(transfer->from, encode(RetryFrame{transfer->id}));
}

void IncomingTransfers::pair_broke(const PairPtr& pair, TransferId id,
                                   const std::optional<Error>& stuck) {
  const IncomingPtr transfer = find(pair->peer, id);
  if (transfer == nullptr) return;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->pair != pair) return;  // it was cancelled, and its id is used again
  }
  if (stuck) return finish(transfer, stuck);
  retry(transfer);
}

// --- end ---

void IncomingTransfers::on_cancel(PeerId from, const CancelFrame& frame) {
  const bool known = frame.code >= static_cast<std::uint8_t>(ErrorCode::invalid_argument) &&
                     frame.code <= static_cast<std::uint8_t>(ErrorCode::internal);
  const Error why =
      Error(known ? static_cast<ErrorCode>(frame.code) : ErrorCode::internal, frame.text)
          .with_remote(true);
  IncomingPtr transfer;
  PairPtr pair;
  {
    const base::MutexLock lock(mutex_);
    IncomingPtr& entry = table_[{from, frame.id}];
    if (entry == nullptr) {
      entry = std::make_shared<Incoming>(from, frame.id);
      count_unclaimed(from);
    }
    if (entry->refused) {
      --unclaimed_[from];
      table_.erase({from, frame.id});
      return;
    }
    if (entry->state == Incoming::State::unclaimed) {
      entry->cancelled = why;  // for receive()
      return;
    }
    transfer = entry;
    pair = transfer->pair;
  }
  if (pair != nullptr) transfers_.communicators().break_pair(pair, why, true);
  end(transfer, why, false);
}

void IncomingTransfers::on_forget(PeerId from, const ForgetFrame& frame) {
  const base::MutexLock lock(mutex_);
  const auto at = table_.find({from, frame.id});
  if (at == table_.end() || at->second->state != Incoming::State::unclaimed ||
      !at->second->cancelled)
    return;
  --unclaimed_[from];
  table_.erase(at);
}

bool IncomingTransfers::end(const IncomingPtr& transfer, std::optional<Error> error, bool tell) {
  std::optional<RtsFrame> rts;
  DeviceTransfers::Arrived arrived;
  DeviceTransfers::Allocate allocate;
  DeviceTransfers::Adopt adopt;
  Lane* lane = nullptr;
  {
    const base::MutexLock lock(mutex_);
    if (std::exchange(transfer->state, Incoming::State::ended) == Incoming::State::ended)
      return false;
    lane = transfer->lane;
    rts = transfer->rts;
    table_.erase({transfer->from, transfer->id});
    // After RETRY, the source announces the transfer once more; the new entry refuses it.
    if (tell && transfer->retried && !rts && !transfers_.is_lost(transfer->from)) {
      claim(transfer->from, transfer->id)->refused = error;
      ++unclaimed_[transfer->from];
    }
    arrived = std::move(transfer->arrived);
    allocate = std::move(transfer->allocate);
    adopt = std::move(transfer->adopt);
    if (lane != nullptr) transfers_.end_transfer();
  }
  if (lane == nullptr) return rts.has_value();  // refuse() claimed it
  if (!error && rts)
    transfers_.report().count(transfer->from, lane->device(), rts->path, false, transfer->bytes);
  if (error && rts) error = error->with_prefix("by " + std::string(to_string(rts->path)));
  transfers_.staging().release(*transfer);
  std::shared_ptr<void> acknowledgment;
  if (!error) {
    acknowledgment = std::shared_ptr<void>(
        nullptr, [self = transfers_.self(), from = transfer->from, id = transfer->id](void*) {
          self->send_frame(from, encode(FinishedFrame{.id = id}));
        });
  }
  lane->post([unused = std::move(allocate), too = std::move(adopt)] {});
  transfers_.call_at_end(
      *lane,
      [arrived = std::move(arrived),
       acknowledgment = std::move(acknowledgment)](std::optional<Error> why) mutable {
        if (arrived) arrived(std::move(why), std::move(acknowledgment));
      },
      std::move(error));
  return rts.has_value();
}

void IncomingTransfers::finish(const IncomingPtr& transfer, std::optional<Error> error) {
  FinishedFrame frame;
  frame.id = transfer->id;
  frame.failed = 1;
  if (error) frame.text = error->what();
  const bool failed = error.has_value();
  if (end(transfer, std::move(error), failed) && failed)
    transfers_.send_frame(transfer->from, encode(frame));
}

void IncomingTransfers::finish_all(std::optional<PeerId> peer, const Error& why) {
  std::vector<IncomingPtr> ended;
  {
    const base::MutexLock lock(mutex_);
    for (const auto& [key, transfer] : table_) {
      if (!peer || key.first == peer) ended.push_back(transfer);
    }
  }
  for (const IncomingPtr& transfer : ended) finish(transfer, why);
}

}  // namespace stitch::transport::gpu
