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

// Names a transfer among the transfers of its source's life; never 0, never reused. The layer above
// carries it to the destination, with the number of bytes, in the message of the tensor.
using TransferId = std::uint64_t;

struct DeviceSpan {
  int device = 0;
  void* data = nullptr;
  std::size_t bytes = 0;
};

// Memory of a receiving device, and its owner.
struct DeviceMemory {
  void* data = nullptr;
  std::shared_ptr<void> owner;  // released once nothing on the device writes to `data` any more
};

// Moves bytes from memory of one worker's device to memory of another's (PROTOCOL.md): within a
// process by a copy, to other devices by two-rank NCCL communicators, otherwise and until such a
// path is open and tested through pinned host memory. Knows no tensors. Owned by a worker; the
// layer above carries its frames.
//
// Thread contract: any thread; no call but shutdown() waits for a device or for a peer. Callbacks
// run once each, on the lane of this worker's device of the transfer, under no lock. They must not
// block, nor call CUDA functions that wait: a lane serves all transfers of its device.
class DeviceTransfers {
 public:
  // No error: the destination has the bytes, and has dealt with them.
  using Done = base::UniqueFunction<void(std::optional<Error>)>;
  // No error: the bytes are in the memory. The transfer ends at its source when the last owner of
  // `acknowledgment` is gone: a worker without transfers may leave. Null with an error.
  using Arrived =
      base::UniqueFunction<void(std::optional<Error>, std::shared_ptr<void> acknowledgment)>;
  // Returns memory for `bytes` on `device`, to be written on `stream`. The transfer fails without
  // data, or with an exception. Runs on the lane with `device` current, not before the transfer's
  // turn. May be destroyed uncalled.
  using Allocate =
      base::UniqueFunction<DeviceMemory(int device, std::size_t bytes, cuda::Stream stream)>;
  // Within a process, on one device: returns whether the destination takes the owner of the bytes
  // (send()'s keep_alive) instead of a copy. Runs as Allocate does. May be destroyed uncalled.
  using Adopt = base::UniqueFunction<bool(const std::shared_ptr<const void>& keep_alive)>;
  // Sends a frame of at most kMaxFrameBytes to a peer. Each frame arrives once, or on_peer_lost()
  // reports the peer; frames may overtake one another. Called from any thread under no lock; must
  // not block, throws nothing, and calls back on_peer_lost() only.
  using SendFrame = std::function<void(PeerId to, base::Bytes frame)>;

  // Says once for each peer and kind of reason why a better path is not used: "NCCL is not used,
  // pinned memory is: ...". Called on a thread of transfers, under no lock.
  using Say = std::function<void(PeerId peer, const std::string& text)>;

  static constexpr std::size_t kMaxFrameBytes = (std::size_t{2} << 20) + 256;

  struct Options {
    PeerId self = 0;
    std::shared_ptr<Lanes> lanes;  // shared by all workers of this process
    SendFrame send_frame;
    Say say = nullptr;                          // null: counters only
    std::string why_no_nccl;                    // the reason, without NCCL
    ProcessIdentity identity = this_process();  // another in tests of several processes in one
    bool use_nccl = true;                       // where the library is there
    bool nccl_between_hosts = true;  // false: within a host only, as NCCL encrypts nothing
    bool use_peer = true;            // between devices of one process
    // Memory for the test of copies between devices: of the kind that transfers have. Null: of
    // cudaMalloc.
    std::function<DeviceMemory(int device, std::size_t bytes, cuda::Stream stream)> allocate =
        nullptr;
    std::chrono::nanoseconds cts_timeout = std::chrono::seconds(2);
    std::chrono::nanoseconds open_timeout = std::chrono::seconds(60);  // of a communicator
    // The launches of a device by NCCL are stalled when none ends for so long, and 10 ns a byte.
    std::chrono::nanoseconds stall_timeout = std::chrono::seconds(60);
    std::chrono::nanoseconds abort_timeout = std::chrono::seconds(30);
    std::chrono::nanoseconds reopen_backoff = std::chrono::seconds(1);  // the first PathPause
    std::size_t nccl_piece_bytes = std::size_t{64} << 20;  // larger transfers go in pieces
    // Communicators by which a device sends, of some 100 MiB each: one more closes the least
    // recently used one, if its last use is so long ago.
    std::size_t max_communicators = 32;
    std::chrono::nanoseconds unused_time = std::chrono::seconds(1);
    std::size_t max_transfers_per_peer = std::size_t{1} << 16;  // announced, not asked for yet
  };

  // Throws Error(invalid_argument) without lanes or a function to send frames.
  explicit DeviceTransfers(Options options);
  // REQUIRES: no thread is inside another method. Shuts down without waiting for transfers.
  ~DeviceTransfers();
  DeviceTransfers(const DeviceTransfers&) = delete;
  DeviceTransfers& operator=(const DeviceTransfers&) = delete;

  // The id for send(), and for the message that names the transfer and is sent before.
  [[nodiscard]] TransferId new_id();
  // Sends `source` to device `to_device` of `to` once the event `ready` has happened; null: now.
  // `keep_alive` owns the bytes and the event, until nothing reads the bytes: maybe after `done`
  // with an error. Throws Error(invalid_argument) without the device, or for null bytes.
  void send(TransferId id, PeerId to, int to_device, DeviceSpan source, cuda::Event ready,
            std::shared_ptr<const void> keep_alive, Done done);

  // Receives the transfer `id` of `from`, announced before or not. To be called once the message
  // that names it is read, before user code: the source's later transfers may wait for it. Throws
  // Error(invalid_argument) without the device, Error(protocol) for a second call.
  void receive(PeerId from, TransferId id, int device, std::size_t bytes, Allocate allocate,
               Arrived arrived, Adopt adopt = nullptr);
  // Refuses a transfer, in place of receive(). Its source's `done` gets `why`.
  void refuse(PeerId from, TransferId id, const Error& why);

  // A frame has arrived. Throws Error(protocol) for bytes that no correct peer sends: the caller
  // ends the connection, then calls on_peer_lost().
  void on_frame(PeerId from, std::span<const std::byte> frame);
  // The peer's life is over: its transfers fail with `why`; nothing more is sent to it.
  void on_peer_lost(PeerId peer, const Error& why);
  // Fails new transfers with Error(shutting_down), waits for the others until `deadline`, then
  // fails them, too, and closes communicators. A second call returns at once.
  void shutdown(std::chrono::steady_clock::time_point deadline);

  using PathCount = gpu::PathCount;
  struct Counters {
    std::vector<PathCount> paths;  // of completed transfers
    std::vector<PathFailures> failures;
    int nccl_version = 0;                            // as peers are told; 0: not used
    std::vector<std::pair<PeerId, int>> peers_nccl;  // the versions that peers have told
    std::vector<int> without_nccl;                   // devices, after an abort that hung
    std::map<int, std::size_t> communicators;        // by device, now
    std::vector<int> held;                           // devices, by a lane_lock(), now
    std::vector<int> lost;                           // devices, to this process
    std::size_t paused = 0;     // pairs of devices, during the pause of their path
    std::uint64_t breaks = 0;   // of communicators
    std::uint64_t retries = 0;  // transfers that began again by staging
    std::size_t outgoing = 0;   // under way
    std::size_t incoming = 0;
  };
  [[nodiscard]] Counters counters() const;
  // Transfers of send() and receive() that have not ended.
  [[nodiscard]] std::size_t under_way() const;

 private:
  const std::shared_ptr<Lanes> lanes_;  // outlives transfers_, which refers to it
  const std::shared_ptr<Transfers> transfers_;
};

}  // namespace stitch::transport::gpu
