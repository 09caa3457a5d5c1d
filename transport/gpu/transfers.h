#pragma once

// One file, though long: the state of a transfer at each end, and the class that keeps it.

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/transport/gpu/communicators.h"
#include "stitch/transport/gpu/device_transfers.h"
#include "stitch/transport/gpu/lane.h"
#include "stitch/transport/gpu/lanes.h"
#include "stitch/transport/gpu/local_copies.h"
#include "stitch/transport/gpu/path_report.h"
#include "stitch/transport/gpu/staging.h"
#include "stitch/transport/gpu/transfer_frames.h"

namespace stitch::transport::gpu {

// A transfer at its source. What owns device memory is released on a lane: that may wait for the
// device.
struct Outgoing {
  Outgoing() = default;
  Outgoing(const Outgoing&) = delete;
  Outgoing& operator=(const Outgoing&) = delete;
  ~Outgoing();

  TransferId id = 0;
  PeerId to = 0;
  int to_device = 0;
  DeviceSpan source;
  cuda::Event ready = nullptr;
  std::shared_ptr<const void> keep_alive;
  Lane* lane = nullptr;

  // Guarded by the lock of Transfers.
  DeviceTransfers::Done done;
  Path path = Path::staging;
  bool announced = false;
  bool retried = false;
  bool ended = false;
  PairPtr pair;
  bool reading = false;                   // a launch of this end reads it or will
  std::optional<FinishedFrame> finished;  // the destination's word

  Staging::Sent staged;
};

// A transfer at its destination.
struct Incoming {
  Incoming() = default;
  Incoming(const Incoming&) = delete;
  Incoming& operator=(const Incoming&) = delete;
  ~Incoming();

  PeerId from = 0;
  TransferId id = 0;

  // Guarded by the lock of Transfers.
  bool wanted = false;
  std::optional<Error> refused;    // by refuse()
  std::optional<Error> cancelled;  // by the source, before receive()
  Lane* lane = nullptr;
  std::size_t bytes = 0;
  DeviceTransfers::Allocate allocate;
  DeviceTransfers::Adopt adopt;
  DeviceTransfers::Arrived arrived;
  std::optional<RtsFrame> rts;
  bool started = false;  // as the RTS has it
  bool retried = false;
  bool ended = false;
  PairPtr pair;

  // Of the lane.
  DeviceMemory memory;
  std::optional<Error> no_memory;

  Staging::Received staged;
};

using OutgoingPtr = std::shared_ptr<Outgoing>;
using IncomingPtr = std::shared_ptr<Incoming>;

// All transfers of one worker: what is under way, which path each takes, how each ends. The paths
// themselves are Communicators, Staging and LocalCopies. Owned by a DeviceTransfers, and kept by
// whatever still runs on a lane for it. Thread contract: any thread; frames are handled on the
// thread that brings them, where no CUDA call is made, everything else on lanes. Its lock is held
// before that of Communicators, and that before the locks of lanes.
class Transfers : public std::enable_shared_from_this<Transfers> {
 public:
  using Options = DeviceTransfers::Options;

  explicit Transfers(Options options);

  // As DeviceTransfers has them.
  TransferId new_id();
  void send(TransferId id, PeerId to, int to_device, DeviceSpan source, cuda::Event ready,
            std::shared_ptr<const void> keep_alive, DeviceTransfers::Done done);
  void receive(PeerId from, TransferId id, int device, std::size_t bytes,
               DeviceTransfers::Allocate allocate, DeviceTransfers::Arrived arrived,
               DeviceTransfers::Adopt adopt);
  void refuse(PeerId from, TransferId id, const Error& why);
  void on_frame(PeerId from, std::span<const std::byte> frame);
  void on_peer_lost(PeerId peer, const Error& why);
  void shutdown(std::chrono::steady_clock::time_point deadline);
  [[nodiscard]] DeviceTransfers::Counters counters() const;
  [[nodiscard]] std::size_t under_way() const;

  // --- for the paths; under none of their locks ---
  [[nodiscard]] Lanes& lanes() const noexcept { return lanes_; }
  [[nodiscard]] const Options& options() const noexcept { return options_; }
  [[nodiscard]] std::uint64_t uid() const noexcept { return uid_; }
  [[nodiscard]] int own_nccl() const { return options_.use_nccl ? lanes_.nccl_version() : 0; }
  [[nodiscard]] PathReport& report() noexcept { return report_; }
  // Nothing is sent to a peer that is lost, nor by a worker that has shut down.
  void send_frame(PeerId to, base::Bytes frame);
  // Nothing before it has come. The own one for the own PeerId.
  [[nodiscard]] std::optional<HelloFrame> hello_of(PeerId peer) const;
  [[nodiscard]] OutgoingPtr find_outgoing(PeerId to, TransferId id) const;
  [[nodiscard]] IncomingPtr find_incoming(PeerId from, TransferId id) const;
  // Lane. False: it has ended, or there is no memory for it (Incoming::no_memory).
  [[nodiscard]] bool allocate(const IncomingPtr& transfer, cuda::Stream stream);
  // Lane. No data where there is none, for that reason.
  [[nodiscard]] DeviceMemory allocate_on(Lane& lane, DeviceTransfers::Allocate allocate,
                                         std::size_t bytes, cuda::Stream stream,
                                         std::string& reason);
  // Lane. Whether the destination has taken the memory of the source itself.
  [[nodiscard]] bool adopt(const IncomingPtr& transfer, const std::shared_ptr<const void>& owner);
  // Ends a transfer at its destination, and tells the source; without an error once the
  // acknowledgment has no owner any more.
  void finish(const IncomingPtr& transfer, std::optional<Error> error);
  // Ends a transfer at its source, whose bytes will not come, and tells the destination.
  void cancel(const OutgoingPtr& transfer, const Error& error);
  // Asks the source to send it again, by staging. `held`: this device is, and the pair lives.
  void retry(const IncomingPtr& transfer, bool held = false);
  // Lane. What a pair had launched is done.
  void launch_done(const NcclPair& pair, TransferId id);
  // A broken pair has left that transfer, on which nothing works at this end any more.
  void left(const PairPtr& pair, TransferId id);
  // The transfer of a broken pair that cannot be aborted fails.
  void fail(const PairPtr& pair, TransferId id, const Error& why);

 private:
  struct Peer {
    bool hello_sent = false;
    std::optional<HelloFrame> hello;
    std::optional<Error> lost;
    // Transfers that it announced and that receive() did not ask for, and those that were refused
    // before they were announced.
    std::size_t unasked = 0;
  };
  [[nodiscard]] bool begin_call();  // out of this object; false once it is closed
  void end_call();
  void greet(PeerId peer);
  void on_hello(PeerId from, HelloFrame hello);
  void on_rts(PeerId from, const RtsFrame& frame);
  void on_retry(PeerId from, TransferId id, const char* frame);  // RETRY or DECLINE
  void on_finished(PeerId from, const FinishedFrame& frame);
  void on_cancel(PeerId from, const CancelFrame& frame);
  void on_forget(PeerId from, const ForgetFrame& frame);
  void begin(const OutgoingPtr& transfer);  // lane: its bytes are there
  [[nodiscard]] PathChoice choose(const Outgoing& transfer);
  void start(const IncomingPtr& transfer);  // it is announced and asked for
  void start_nccl(const IncomingPtr& transfer, const RtsFrame& rts);
  void end_if_settled(const OutgoingPtr& transfer);
  // NCCL reads the bytes no more.
  void stop_reading(PeerId to, TransferId id);
  bool end(const OutgoingPtr& transfer, std::optional<Error> error);
  // Whether it has ended now, announced by its source; `tell`: that is told of an error, if need be
  // when it announces the transfer once more.
  bool end(const IncomingPtr& transfer, std::optional<Error> error, bool tell);
  void call_on(Lane& lane, DeviceTransfers::Done done, std::optional<Error> error);
  // The transfer that the layer above asks for or refuses now. Throws Error(protocol) if it did so
  // before.
  [[nodiscard]] IncomingPtr ask_for(PeerId from, TransferId id) STITCH_REQUIRES(mutex_);
  void check_unasked(Peer& peer) STITCH_REQUIRES(mutex_);

  Lanes& lanes_;
  const Options options_;  // without the lanes
  const std::uint64_t uid_;
  PathReport report_;
  Communicators communicators_;
  Staging staging_;
  LocalCopies local_;

  mutable base::Mutex mutex_;
  base::CondVar changed_;
  bool closing_ STITCH_GUARDED_BY(mutex_) = false;
  bool closed_ STITCH_GUARDED_BY(mutex_) = false;
  std::size_t calls_ STITCH_GUARDED_BY(mutex_) = 0;
  TransferId last_id_ STITCH_GUARDED_BY(mutex_) = 0;
  std::uint64_t retries_ STITCH_GUARDED_BY(mutex_) = 0;
  std::map<PeerId, Peer> peers_ STITCH_GUARDED_BY(mutex_);
  std::map<TransferId, OutgoingPtr> outgoing_ STITCH_GUARDED_BY(mutex_);
  std::map<std::pair<PeerId, TransferId>, IncomingPtr> incoming_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::transport::gpu
