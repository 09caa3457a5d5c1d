#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "stitch/base/bytes.h"
#include "stitch/base/error.h"
#include "stitch/base/unique_function.h"
#include "stitch/transport/gpu/cuda_api.h"
#include "stitch/transport/gpu/path_choice.h"

namespace stitch::transport::gpu {

class Lanes;
class Transfers;

// One life of one worker of the world, numbered by the layer above: a worker that comes back has
// another PeerId.
using PeerId = std::uint64_t;
// Names a transfer among those of its source's life; never 0, never reused. The layer above carries
// it to the destination, with the number of bytes, in the message that the tensor belongs to.
using TransferId = std::uint64_t;

struct DeviceSpan {
  int device = 0;
  void* data = nullptr;
  std::size_t bytes = 0;
};

// Memory of a receiving device, and what owns it.
struct DeviceMemory {
  void* data = nullptr;
  std::shared_ptr<void> owner;  // kept until nothing on the device writes to `data` any more
};

// Moves bytes from memory of one worker's device to memory of another's (PROTOCOL.md): within a
// process by a copy, to other devices by two-rank NCCL communicators, otherwise and until such a
// path is open and tested through pinned host memory. Knows no tensors. Owned by a worker. It sends
// no bytes itself: the layer above carries its frames.
//
// Thread contract: any thread; no call waits for a device or for a peer but shutdown(). Callbacks
// run once each, on the lane of this worker's device of the transfer, under no lock. They must not
// block, and must not call CUDA functions that wait: a lane serves all transfers of its device.
class DeviceTransfers {
 public:
  // No error: the destination has the bytes, and has dealt with them.
  using Done = base::UniqueFunction<void(std::optional<Error>)>;
  // No error: the bytes are in the memory. Their source hears of it, and its transfer ends, when
  // the last owner of `acknowledgment` is gone: once what the bytes were for has been done, so that
  // a worker whose transfers have ended may leave. Null with an error.
  using Arrived =
      base::UniqueFunction<void(std::optional<Error>, std::shared_ptr<void> acknowledgment)>;
  // Returns memory for `bytes` on `device`, to be written on `stream`; or no data when there is
  // none, or throws: then that transfer fails and the others go on. Runs on the lane with `device`
  // current, not before the transfer's turn. May be destroyed uncalled.
  using Allocate =
      base::UniqueFunction<DeviceMemory(int device, std::size_t bytes, cuda::Stream stream)>;
  // Within a process, on one device: takes what owns the bytes (send()'s keep_alive) in place of a
  // copy of them, if it can be given away. True: it was taken, nothing is allocated. Runs as
  // Allocate does. May be destroyed uncalled.
  using Adopt = base::UniqueFunction<bool(const std::shared_ptr<const void>& keep_alive)>;
  // Sends a frame of at most kMaxFrameBytes to a peer. Frames may overtake one another; each
  // arrives once, or the peer is reported by on_peer_lost(). Called from any thread and under no
  // lock; must not block, and calls back nothing but on_peer_lost(): errors are for it to report as
  // the loss of the peer.
  using SendFrame = std::function<void(PeerId to, base::Bytes frame)>;

  // Says once for each peer, and each reason of a kind, why a better path is not used: "NCCL is not
  // used, pinned memory is: ...". Called on a thread of transfers, under no lock.
  using Say = std::function<void(PeerId peer, const std::string& text)>;

  static constexpr std::size_t kMaxFrameBytes = (std::size_t{2} << 20) + 256;

  struct Options {
    PeerId self = 0;
    std::shared_ptr<Lanes> lanes;  // of this process: all its workers share them
    SendFrame send_frame;
    Say say = nullptr;        // null: it is only counted
    std::string why_no_nccl;  // where there is none
    // What tells processes and hosts apart; this_process() but for tests of several in one.
    ProcessIdentity identity = this_process();
    bool use_nccl = true;            // where the library is there
    bool nccl_between_hosts = true;  // false: within a host only, since NCCL encrypts nothing
    bool use_peer = true;            // between devices of one process
    // Memory that copies between devices are tested with: of the kind that transfers have. Null: of
    // cudaMalloc.
    std::function<DeviceMemory(int device, std::size_t bytes, cuda::Stream stream)> allocate =
        nullptr;
    std::chrono::nanoseconds cts_timeout = std::chrono::seconds(2);
    std::chrono::nanoseconds open_timeout = std::chrono::seconds(60);  // of a communicator
    // For so long, and 10 ns a byte, may nothing end of what a device runs by NCCL.
    std::chrono::nanoseconds stall_timeout = std::chrono::seconds(60);
    std::chrono::nanoseconds abort_timeout = std::chrono::seconds(30);
    // Before a path that was refused or broke is tried again; see PathPause.
    std::chrono::nanoseconds reopen_backoff = std::chrono::seconds(1);
    std::size_t nccl_piece_bytes = std::size_t{64} << 20;  // larger transfers go in pieces
    // Communicators by which a device sends: for one more, the one that was not used for longest is
    // closed, if that is so long. Each takes some 100 MiB of the device.
    std::size_t max_communicators = 32;
    std::chrono::nanoseconds unused_time = std::chrono::seconds(1);
    std::size_t max_transfers_per_peer = std::size_t{1} << 16;  // announced, not asked for yet
  };

  // Throws Error(invalid_argument) without lanes or a function to send frames.
  explicit DeviceTransfers(Options options);
  // REQUIRES: no thread is inside another method. Does what shutdown(now) does.
  ~DeviceTransfers();
  DeviceTransfers(const DeviceTransfers&) = delete;
  DeviceTransfers& operator=(const DeviceTransfers&) = delete;

  // For send(), and for the message that names the transfer, which is sent before that.
  [[nodiscard]] TransferId new_id();
  // Starts to send `source` to device `to_device` of `to` once `ready` has happened: an event
  // recorded on the stream that produces the bytes; null: they are there now. `keep_alive` owns the
  // bytes and the event; it is kept until nothing reads them any more, which may be after `done` if
  // that gets an error. Throws Error(invalid_argument) for a device that is not there or null
  // bytes.
  void send(TransferId id, PeerId to, int to_device, DeviceSpan source, cuda::Event ready,
            std::shared_ptr<const void> keep_alive, Done done);

  // Receives the transfer `id` of `from`. To be called as soon as the message that names it has
  // been read, before any user code runs: the source's later transfers may wait for it. The
  // transfer may have been announced by its source before or not yet. Throws
  // Error(invalid_argument) for a device that is not there, Error(protocol) if `id` is being
  // received already.
  void receive(PeerId from, TransferId id, int device, std::size_t bytes, Allocate allocate,
               Arrived arrived, Adopt adopt = nullptr);
  // In place of receive(): the transfer is not wanted. Its source's `done` gets `why`.
  void refuse(PeerId from, TransferId id, const Error& why);

  // A frame arrived. The bytes are needed only during the call. Throws Error(protocol) for bytes
  // that no correct peer sends; the caller ends the connection, then calls on_peer_lost().
  void on_frame(PeerId from, std::span<const std::byte> frame);
  // The peer's life is over: its transfers fail with `why`; nothing more is sent to it.
  void on_peer_lost(PeerId peer, const Error& why);
  // Fails what is new with Error(shutting_down), waits until `deadline` for what is under way, then
  // fails the rest and closes communicators. A second call returns at once.
  void shutdown(std::chrono::steady_clock::time_point deadline);

  struct PathCount {
    PeerId peer = 0;
    int device = 0;  // of this worker
    Path path = Path::staging;
    bool sent = false;  // else received
    std::uint64_t messages = 0;
    std::uint64_t bytes = 0;
  };
  // How often a path was refused or broke, where it was noticed.
  struct PathFailures {
    PeerId peer = 0;
    int device = 0;  // of this worker
    Path path = Path::staging;
    std::uint64_t failures = 0;
  };
  struct Counters {
    std::vector<PathCount> paths;  // of completed transfers
    std::vector<PathFailures> failures;
    int nccl_version = 0;  // as this worker tells it to others; 0: it uses none
    std::vector<std::pair<PeerId, int>> peers_nccl;  // what they have told
    std::vector<int> without_nccl;                   // devices, after an abort that hung
    std::map<int, std::size_t> communicators;        // by which a device sends or receives, now
    std::vector<int> held;                           // devices, by a lane_lock(), now
    std::vector<int> lost;                           // devices, to this process
    std::size_t paused = 0;     // pairs of devices whose path is not to be tried yet
    std::uint64_t breaks = 0;   // of communicators
    std::uint64_t retries = 0;  // transfers that began again by staging
    std::size_t outgoing = 0;   // under way
    std::size_t incoming = 0;
  };
  [[nodiscard]] Counters counters() const;
  // Transfers of send(), and those of receive() that have not ended.
  [[nodiscard]] std::size_t under_way() const;

 private:
  const std::shared_ptr<Lanes> lanes_;  // outlives transfers_, which refers to it
  const std::shared_ptr<Transfers> transfers_;
};

}  // namespace stitch::transport::gpu
