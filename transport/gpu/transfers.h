#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/transport/gpu/incoming.h"
#include "stitch/transport/gpu/local_copies.h"
#include "stitch/transport/gpu/outgoing.h"

namespace stitch::transport::gpu {

// The transfers of one worker: its peers, the two ends of transfers, the paths, and the calls that
// run outside of this object. Owned by a DeviceTransfers, and kept by the tasks of lanes. Thread
// contract: any thread. No other lock is acquired under its own.
class Transfers : public std::enable_shared_from_this<Transfers> {
 public:
  using Options = DeviceTransfers::Options;

  explicit Transfers(Options options);

  // As DeviceTransfers has them.
  void on_frame(PeerId from, std::span<const std::byte> frame);
  void on_peer_lost(PeerId peer, const Error& why);
  void shutdown(std::chrono::steady_clock::time_point deadline);
  [[nodiscard]] DeviceTransfers::Counters counters() const;
  [[nodiscard]] std::size_t under_way() const;

  // For tasks and callbacks: keeps this object alive.
  [[nodiscard]] std::shared_ptr<Transfers> self() { return shared_from_this(); }
  [[nodiscard]] OutgoingTransfers& outgoing() noexcept { return outgoing_; }
  [[nodiscard]] IncomingTransfers& incoming() noexcept { return incoming_; }
  [[nodiscard]] Communicators& communicators() noexcept { return communicators_; }
  [[nodiscard]] Staging& staging() noexcept { return staging_; }
  [[nodiscard]] LocalCopies& local_copies() noexcept { return local_copies_; }
  [[nodiscard]] PathReport& report() noexcept { return report_; }
  [[nodiscard]] Lanes& lanes() const noexcept { return lanes_; }
  [[nodiscard]] const Options& options() const noexcept { return options_; }
  [[nodiscard]] std::uint64_t uid() const noexcept { return uid_; }
  [[nodiscard]] int own_nccl() const { return options_.use_nccl ? lanes_.nccl_version() : 0; }

  // --- peers ---
  // Sends a frame under no lock, unless the peer is lost or this worker has shut down.
  void send_frame(PeerId to, base::Bytes frame);
  // Sends HELLO, once.
  void greet(PeerId peer);
  // The peer's HELLO, if it has come; for the own PeerId, the own one.
  [[nodiscard]] std::optional<HelloFrame> hello_of(PeerId peer) const;
  [[nodiscard]] bool is_lost(PeerId peer) const;
  // The reason to refuse new transfers with that peer.
  [[nodiscard]] std::optional<Error> refusal(PeerId peer) const;

  // --- calls ---
  // Counts a transfer as under way, until call_at_end(); returns refusal().
  [[nodiscard]] std::optional<Error> begin_transfer(PeerId peer);
  // The transfer is no more under way once its callback has run. call_at_end() has to follow.
  void end_transfer();
  // Runs `done` on the lane: the memory that callbacks touch may belong to a device.
  void call_at_end(Lane& lane, DeviceTransfers::Done done, std::optional<Error> error);
  // A call out of this object begins. Returns false after shutdown().
  [[nodiscard]] bool begin_call();
  void end_call();
  // Lane. Returns no data when there is no memory, for that reason.
  [[nodiscard]] DeviceMemory allocate(Lane& lane, DeviceTransfers::Allocate allocate,
                                      std::size_t bytes, cuda::Stream stream, std::string& reason);

 private:
  enum class State : std::uint8_t { open, closing, closed };
  struct Peer {
    bool hello_sent = false;
    std::optional<HelloFrame> hello;
    std::optional<Error> lost;
  };
  void on_hello(PeerId from, HelloFrame hello);

  Lanes& lanes_;
  Options options_;  // constant; without the lanes
  const std::uint64_t uid_;
  PathReport report_;
  Communicators communicators_;
  Staging staging_;
  LocalCopies local_copies_;
  OutgoingTransfers outgoing_;
  IncomingTransfers incoming_;

  mutable base::Mutex mutex_;
  base::CondVar changed_;
  State state_ STITCH_GUARDED_BY(mutex_) = State::open;
  std::size_t under_way_ STITCH_GUARDED_BY(mutex_) = 0;
  std::size_t calls_ STITCH_GUARDED_BY(mutex_) = 0;
  std::map<PeerId, Peer> peers_ STITCH_GUARDED_BY(mutex_);
};

}  // namespace stitch::transport::gpu
