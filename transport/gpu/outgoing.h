#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/transport/gpu/communicators.h"

namespace stitch::transport::gpu {

class Transfers;

// A transfer at its source. A lane releases the owner of device memory: that may wait for the
// device.
struct Outgoing {
  enum class State : std::uint8_t {
    preparing,  // until its bytes are ready
    announced,  // by RTS
    ended,
  };

  ~Outgoing();

  TransferId id = 0;
  PeerId to = 0;
  int to_device = 0;
  DeviceSpan source;
  cuda::Event ready = nullptr;
  std::shared_ptr<const void> keep_alive;
  Lane* lane = nullptr;

  // Guarded by the lock of OutgoingTransfers.
  State state = State::preparing;
  DeviceTransfers::Done done;
  Path path = Path::staging;
  bool retried = false;
  PairPtr pair{};
  bool reading = false;                     // a launch of this end reads the bytes, or will
  std::optional<FinishedFrame> finished{};  // from the destination

  Staging::Sent staged{};
};
using OutgoingPtr = std::shared_ptr<Outgoing>;

// The transfers that one worker sends: the path that each takes, and how each ends. Owned by
// Transfers. Thread contract: any thread. Frames are handled on the thread that brings them,
// without a call of CUDA; paths are chosen on lanes. Its lock comes before the locks of Transfers
// and of Communicators.
class OutgoingTransfers {
 public:
  explicit OutgoingTransfers(Transfers& transfers) : transfers_(transfers) {}

  // As DeviceTransfers has them.
  [[nodiscard]] TransferId new_id() noexcept { return ++last_id_; }
  void send(TransferId id, PeerId to, int to_device, DeviceSpan source, cuda::Event ready,
            std::shared_ptr<const void> keep_alive, DeviceTransfers::Done done);

  void on_grant(PeerId from, const GrantFrame& frame);
  void on_retry(PeerId from, TransferId id);
  void on_finished(PeerId from, const FinishedFrame& frame);

  [[nodiscard]] OutgoingPtr find(PeerId to, TransferId id) const;
  // Ends a transfer with `error`, and sends CANCEL to its destination.
  void cancel(const OutgoingPtr& transfer, const Error& error);
  // No launch of NCCL reads the bytes any more.
  void stop_reading(const OutgoingPtr& transfer);
  // Cancels all transfers, or all to that peer.
  void cancel_all(std::optional<PeerId> peer, const Error& why);
  void add_to(DeviceTransfers::Counters& counters) const;

 private:
  void begin(const OutgoingPtr& transfer);  // lane; the bytes are ready
  [[nodiscard]] PathChoice choose(const Outgoing& transfer);
  void report(const Outgoing& transfer, const PathChoice& choice, int destination_nccl);
  // Ends the transfer if FINISHED has come and nothing reads the bytes.
  void end_if_finished(const OutgoingPtr& transfer);
  // Returns false for a transfer that has ended before.
  bool end(const OutgoingPtr& transfer, std::optional<Error> error);

  Transfers& transfers_;
  std::atomic<TransferId> last_id_{0};
  mutable base::Mutex mutex_;
  std::uint64_t retries_ STITCH_GUARDED_BY(mutex_) = 0;
  std::map<TransferId, OutgoingPtr> table_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::transport::gpu
