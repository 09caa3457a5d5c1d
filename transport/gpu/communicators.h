#pragma once

// One file, though long: the state of a communicator, and the class that keeps it.

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/transport/gpu/device_transfers.h"
#include "stitch/transport/gpu/lane.h"
#include "stitch/transport/gpu/lanes.h"
#include "stitch/transport/gpu/transfer_frames.h"
#include "stitch/transport/gpu/transfer_order.h"

namespace stitch::transport::gpu {

class Transfers;

// One direction between two devices of two workers in one epoch: a two-rank communicator, in which
// the source is rank 0. Fields without a remark are constant once it is in a table.
struct NcclPair {
  enum class State : std::uint8_t { opening, testing, open, broken };
  struct Launched {
    std::shared_ptr<void> owner;  // keeps the memory alive
    std::size_t bytes = 0;
  };

  PairName name;
  PeerId peer = 0;
  TransferOrder::End end = TransferOrder::End::source;
  std::uint64_t source_uid = 0;
  TransferOrder::Pair token = 0;
  Lane* lane = nullptr;
  std::size_t piece_bytes = 0;
  nccl::UniqueId unique_id{};

  // Guarded by the lock of Communicators.
  State state = State::opening;
  bool being_made = false;   // on a thread of its own, which alone uses `comm` then
  bool initialized = false;  // here
  bool peer_ready = false;
  bool tested = false;      // destination: its test was announced, and entered in the order
  bool test_waits = false;  // destination: it was announced, and waits for who holds the device
  std::chrono::steady_clock::time_point used{};  // source: last by a transfer
  std::size_t under_way = 0;                     // source: announced and not done here
  bool ordered = false;  // in the lane's order; then the lane uses `comm`, before the connector
  std::optional<Error> why;
  std::map<std::uint64_t, Launched> launched;  // and not finished
  bool aborted = false;

  nccl::Result made = nccl::kSuccess;  // how it went; of that thread, then of the connector
  // Of the connector until it is ordered, but while it is being made. Then the lane calls it under
  // `comm_mutex`, and not once `comm_gone` is set: a lane that is blocked in a CUDA call, maybe
  // until this very communicator is aborted, does not delay that.
  nccl::Comm comm = nullptr;
  base::Mutex comm_mutex;  // after the lock of Communicators; held for calls that do not block
  bool comm_gone STITCH_GUARDED_BY(comm_mutex) = false;

  void* test_memory = nullptr;      // of the lane
  std::byte* test_bytes = nullptr;  // of the lane; pinned
};
using PairPtr = std::shared_ptr<NcclPair>;

// The communicators of one worker: opened in the background, tested by a first transfer, broken by
// the first error at either end, aborted, opened again after a pause; and what they launch, in the
// order of their lanes. Owned by Transfers. Thread contract: any thread; no call waits for a device
// or for NCCL but on threads made for that. Its lock is held after that of Transfers, before those
// of lanes.
class Communicators {
 public:
  using End = TransferOrder::End;
  // What of a transfer has been entered in the order of this end's device.
  struct Entered {
    PairPtr pair{};  // null: nothing, and `held` says whether that is because the device is held
    std::uint64_t clock = 0;
    bool held = false;
  };

  explicit Communicators(Transfers& transfers);

  // --- source; under the lock of Transfers or none ---
  [[nodiscard]] PathState state(PeerId to, int device, int to_device) const;
  // A transfer has come by it: the next pause is short.
  void worked(PeerId to, int device, int to_device);
  // Enters a transfer. Null pair where none is open. start_watching() follows.
  [[nodiscard]] Entered announce(PeerId to, int device, int to_device, TransferId id);
  // The destination will not launch it. True: it has left the order.
  [[nodiscard]] bool withdraw(const PairPtr& pair, TransferId id);
  // --- destination; likewise ---
  [[nodiscard]] Entered accept(PeerId from, const RtsFrame& rts);

  // --- under no lock ---
  // Begins to open one, in place of one that is not used if there are too many.
  void open(PeerId to, Lane& lane, int to_device);
  // Breaks, while anything is launched or announced, what is late.
  void start_watching();
  void break_pair(const PairPtr& pair, const Error& why, bool tell);
  void accept_test(PeerId from, const RtsFrame& rts, bool again = false);
  void on_cts(PeerId from, const CtsFrame& frame);
  void on_test_finished(PeerId from, const FinishedFrame& frame);
  void on_comm_open(PeerId from, const CommOpenFrame& frame);
  void on_comm_ready(PeerId from, const CommReadyFrame& frame);
  void on_comm_break(PeerId from, const CommBreakFrame& frame);
  // Breaks all that there are with the peer, and opens none any more.
  void on_peer_lost(PeerId peer, const Error& why);
  void close(const Error& why);  // likewise, of all peers; telling them
  void add_to(DeviceTransfers::Counters& counters) const;

 private:
  using Clock = std::chrono::steady_clock;
  // (peer, which end this worker is, source device, destination device)
  using SlotKey = std::tuple<PeerId, End, std::uint32_t, std::uint32_t>;
  struct Slot {
    std::uint64_t epoch = 0;  // of the last pair
    PairPtr pair;             // null: there is none that is not broken
    PathPause pause;
    std::vector<PairPtr> accepted{};  // destination: those that may not have ended yet
  };

  // Null: there is none.
  [[nodiscard]] const Slot* source_slot(PeerId to, int device, int to_device) const
      STITCH_REQUIRES(mutex_);
  [[nodiscard]] PairPtr find(PeerId peer, End end, const PairName& name) const
      STITCH_REQUIRES(mutex_);
  [[nodiscard]] bool has_room(const Lane& lane, PairPtr& unused) const STITCH_REQUIRES(mutex_);
  [[nodiscard]] bool broken(const NcclPair& pair) const;
  [[nodiscard]] Error error_of(NcclPair& pair, nccl::Result result, const std::string& what) const;
  // Connector, then a thread of its own, then the connector again.
  void begin_opening(const PairPtr& pair);
  [[nodiscard]] bool make(const PairPtr& pair);  // false: broken meanwhile, and aborted
  void poll_opening(const PairPtr& pair, Clock::time_point deadline);
  void order_if_ready(const PairPtr& pair);
  // Lane.
  void begin_test(const PairPtr& pair);
  [[nodiscard]] Lane::Watch launch(const PairPtr& pair, std::uint64_t number);
  [[nodiscard]] nccl::Result async_error(NcclPair& pair) const;
  [[nodiscard]] nccl::Result issue(NcclPair& pair, void* memory, std::size_t bytes, bool to_sink);
  void issued(const PairPtr& pair, std::uint64_t number);
  void launch_done(const PairPtr& pair, std::uint64_t number, cuda::Status status);
  [[nodiscard]] void* test_memory(NcclPair& pair);
  void test_arrived(const PairPtr& pair);
  // `unused`: nothing has failed, it makes room for another one.
  void end_pair(const PairPtr& pair, const Error& why, bool tell, bool unused);
  void retire(const PairPtr& pair);   // aborts what the pair runs on the device
  void retired(const PairPtr& pair);  // lane: nothing of the pair runs on the device any more
  void on_abort_stuck(const PairPtr& pair);
  void watch();
  [[nodiscard]] std::shared_ptr<Transfers> kept() const;

  Transfers& transfers_;
  Lanes& lanes_;
  const DeviceTransfers::Options& options_;

  mutable base::Mutex mutex_;
  std::map<SlotKey, Slot> slots_ STITCH_GUARDED_BY(mutex_);
  std::map<TransferOrder::Pair, PairPtr> ordered_ STITCH_GUARDED_BY(mutex_);  // by token
  std::set<PeerId> lost_ STITCH_GUARDED_BY(mutex_);
  bool closed_ STITCH_GUARDED_BY(mutex_) = false;
  std::uint64_t breaks_ STITCH_GUARDED_BY(mutex_) = 0;
  bool watching_ STITCH_GUARDED_BY(mutex_) = false;
};

}  // namespace stitch::transport::gpu
