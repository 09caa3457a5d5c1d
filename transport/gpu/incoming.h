#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/transport/gpu/communicators.h"

namespace stitch::transport::gpu {

class Transfers;

// A transfer at its destination. A lane releases the owner of device memory: that may wait for the
// device.
struct Incoming {
  enum class State : std::uint8_t {
    unclaimed,  // until receive() or refuse(); then refuse() waits for RTS in this state
    claimed,    // by receive(); RTS is awaited, again after RETRY
    started,    // on the path of its RTS
    ended,
  };

  Incoming(PeerId of, TransferId number) : from(of), id(number) {}
  ~Incoming();

  const PeerId from;
  const TransferId id;

  // Guarded by the lock of IncomingTransfers.
  State state = State::unclaimed;
  std::optional<Error> refused;    // by refuse()
  std::optional<Error> cancelled;  // by the source, before receive()
  Lane* lane = nullptr;
  std::size_t bytes = 0;
  DeviceTransfers::Allocate allocate;
  DeviceTransfers::Adopt adopt;
  DeviceTransfers::Arrived arrived;
  std::optional<RtsFrame> rts;
  bool retried = false;
  PairPtr pair;

  // Of the lane.
  DeviceMemory memory;
  std::optional<Error> no_memory;

  Staging::Received staged;
};
using IncomingPtr = std::shared_ptr<Incoming>;

// The transfers that one worker receives: each meets the RTS of its source and the receive() of the
// layer above, in either order. Owned by Transfers. Thread contract: as OutgoingTransfers.
class IncomingTransfers {
 public:
  explicit IncomingTransfers(Transfers& transfers) : transfers_(transfers) {}

  // As DeviceTransfers has them.
  void receive(PeerId from, TransferId id, int device, std::size_t bytes,
               DeviceTransfers::Allocate allocate, DeviceTransfers::Arrived arrived,
               DeviceTransfers::Adopt adopt);
  void refuse(PeerId from, TransferId id, const Error& why);

  void on_rts(PeerId from, const RtsFrame& frame);
  void on_data(PeerId from, const DataFrame& frame);
  void on_cancel(PeerId from, const CancelFrame& frame);
  void on_forget(PeerId from, const ForgetFrame& frame);

  // --- for the paths ---
  [[nodiscard]] IncomingPtr find(PeerId from, TransferId id) const;
  // Lane. Returns false for a transfer that has ended, or without memory (Incoming::no_memory).
  [[nodiscard]] bool allocate(const IncomingPtr& transfer, cuda::Stream stream);
  // Lane. Returns whether the destination has taken the memory of the source itself.
  [[nodiscard]] bool adopt(const IncomingPtr& transfer, const std::shared_ptr<const void>& owner);
  // Ends a transfer, and sends FINISHED: with an error now, else at the end of the acknowledgment.
  void finish(const IncomingPtr& transfer, std::optional<Error> error);
  // Asks the source to begin again by staging.
  void retry(const IncomingPtr& transfer);
  // The pair of the transfer is broken: retries it, or fails it with `stuck` if the abort hangs.
  void pair_broke(const PairPtr& pair, TransferId id, const std::optional<Error>& stuck);

  // Finishes all transfers, or all from that peer.
  void finish_all(std::optional<PeerId> peer, const Error& why);
  void add_to(DeviceTransfers::Counters& counters) const;

 private:
  // The entry that receive() or refuse() claims. Throws Error(protocol) for a second claim.
  [[nodiscard]] IncomingPtr& claim(PeerId from, TransferId id) STITCH_REQUIRES(mutex_);
  void count_unclaimed(PeerId from) STITCH_REQUIRES(mutex_);
  void start(const IncomingPtr& transfer);
  void start_nccl(const IncomingPtr& transfer, const RtsFrame& rts);
  // Ends a transfer. Returns whether the source has announced it and awaits an answer. `tell`: an
  // error is told to the source, also when it announces the transfer only later.
  bool end(const IncomingPtr& transfer, std::optional<Error> error, bool tell);

  Transfers& transfers_;
  mutable base::Mutex mutex_;
  std::map<std::pair<PeerId, TransferId>, IncomingPtr> table_ STITCH_GUARDED_BY(mutex_);
  // By peer: announced and not claimed, or refused and not announced.
  std::map<PeerId, std::size_t> unclaimed_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::transport::gpu
