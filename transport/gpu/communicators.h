#pragma once

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

// One direction between two devices of two workers in one epoch: a two-rank communicator of NCCL,
// whose rank 0 is the source. Owned by Communicators and by the steps that run for it.
struct NcclPair {
  enum class State : std::uint8_t { opening, testing, open, broken };
  enum class CommState : std::uint8_t {
    none,         // not begun, or not to be made
    making,       // on a thread of its own, which alone uses `comm`
    made,         // NCCL connects it
    initialized,  // at this end
    aborted,
  };
  // The RTS of the test at the destination.
  enum class Test : std::uint8_t {
    none,       // until it comes
    postponed,  // while a LaneLock holds the device
    entered,    // in the order
  };
  struct Launched {
    std::shared_ptr<void> owner;  // keeps the memory alive
    std::size_t bytes = 0;
  };

  NcclPair(const PairName& pair, PeerId of, TransferOrder::End own_end, std::uint64_t uid,
           TransferOrder::Pair own_token, Lane* own_lane, std::size_t piece)
      : name(pair),
        peer(of),
        end(own_end),
        source_uid(uid),
        token(own_token),
        lane(own_lane),
        piece_bytes(piece) {}

  const PairName name;
  const PeerId peer;
  const TransferOrder::End end;
  const std::uint64_t source_uid;
  const TransferOrder::Pair token;
  Lane* const lane;
  const std::size_t piece_bytes;
  nccl::UniqueId unique_id{};  // at the source, made with `comm`; else from COMM_OPEN

  // Guarded by the lock of Communicators.
  State state = State::opening;
  CommState comm_state = CommState::none;
  Test test = Test::none;  // at the destination
  bool peer_ready = false;
  bool ordered = false;  // in the order of the lane, which uses `comm` from then on
  // Source: by the last transfer.
  std::chrono::steady_clock::time_point used = std::chrono::steady_clock::now();
  std::size_t under_way = 0;                   // source: transfers announced and not done here
  std::optional<Error> why;                    // broken
  std::map<std::uint64_t, Launched> launched;  // and not finished

  // NCCL's answer to the making; of that thread, then of the connector.
  nccl::Result made = nccl::kSuccess;
  // Of the thread that makes it, then of the connector, then of the lane. The lane calls it under
  // `comm_mutex` until `comm_gone`: a lane that is blocked in a call of CUDA, maybe until the abort
  // of this very communicator, does not delay the abort.
  nccl::Comm comm = nullptr;
  base::Mutex comm_mutex;  // after the lock of Communicators; held for calls that do not block
  bool comm_gone STITCH_GUARDED_BY(comm_mutex) = false;

  void* test_memory = nullptr;      // of the lane
  std::byte* test_bytes = nullptr;  // of the lane; pinned

  // --- on the thread that has `comm` ---
  [[nodiscard]] Error error_of(const NcclApi& nccl, nccl::Result result, const std::string& what);
  // The state of the communicator; kRemoteError once it is to be aborted.
  [[nodiscard]] nccl::Result async_error(const NcclApi& nccl);
  // Sends or receives `bytes` in one group of pieces; all pieces to the same place for a sink.
  [[nodiscard]] nccl::Result issue(const NcclApi& nccl, void* memory, std::size_t bytes,
                                   bool to_sink);
};
using PairPtr = std::shared_ptr<NcclPair>;

// The communicators of one worker: opened in the background, tested by a first transfer, broken by
// the first error at either end, aborted, opened again after a pause; and their launches, in the
// order of their lanes. Owned by Transfers. Thread contract: any thread; no call waits for a device
// or for NCCL but on threads made for that. Its lock comes after the locks of OutgoingTransfers and
// IncomingTransfers, before the locks of lanes.
class Communicators {
 public:
  using End = TransferOrder::End;
  // The entry of a transfer in the order of this end's device; without a pair, there is none.
  struct Entered {
    PairPtr pair{};
    std::uint64_t clock = 0;
  };

  explicit Communicators(Transfers& transfers);

  // --- source; under the lock of OutgoingTransfers or none ---
  [[nodiscard]] PathState state(PeerId to, int device, int to_device);
  // A transfer has come by this path: its next pause is short.
  void worked(PeerId to, int device, int to_device);
  // Enters a transfer, if a pair is open. The caller calls start_watching() under no lock.
  [[nodiscard]] Entered announce(PeerId to, int device, int to_device, TransferId id);
  // The destination will not launch the transfer. Returns whether it has left the order.
  [[nodiscard]] bool withdraw(const PairPtr& pair, TransferId id);
  // --- destination; under the lock of IncomingTransfers or none ---
  [[nodiscard]] Entered accept(PeerId from, const RtsFrame& rts);

  // --- under no lock ---
  // Begins to open a pair; the least recently used pair of the device goes where there are too
  // many.
  void open(PeerId to, Lane& lane, int to_device);
  // Breaks late pairs from now on, until nothing is announced or launched.
  void start_watching();
  // `tell`: with COMM_BREAK. `unused`: the pair has not failed, but makes room for another.
  void break_pair(const PairPtr& pair, const Error& why, bool tell, bool unused = false);
  void accept_test(PeerId from, const RtsFrame& rts, bool again = false);
  void on_cts(PeerId from, const CtsFrame& frame);
  void on_test_finished(PeerId from, const FinishedFrame& frame);
  void on_comm_open(PeerId from, const CommOpenFrame& frame);
  void on_comm_ready(PeerId from, const CommReadyFrame& frame);
  void on_comm_break(PeerId from, const CommBreakFrame& frame);
  // Breaks all pairs, or all pairs with that peer, and opens no more.
  void break_all(std::optional<PeerId> peer, const Error& why);
  void add_to(DeviceTransfers::Counters& counters) const;

 private:
  using Clock = std::chrono::steady_clock;
  // (peer, which end this worker is, source device, destination device)
  using SlotKey = std::tuple<PeerId, End, std::uint32_t, std::uint32_t>;
  struct Slot {
    std::uint64_t epoch = 0;  // of the last pair
    PairPtr pair;             // not broken
    PathPause pause;
    std::vector<PairPtr> accepted{};  // destination: pairs that may not be aborted yet
  };

  [[nodiscard]] Slot* source_slot(PeerId to, int device, int to_device) STITCH_REQUIRES(mutex_);
  [[nodiscard]] PairPtr find(PeerId peer, End end, const PairName& name) const
      STITCH_REQUIRES(mutex_);
  [[nodiscard]] bool has_room(const Lane& lane, PairPtr& unused) const STITCH_REQUIRES(mutex_);
  [[nodiscard]] bool broken(const NcclPair& pair) const;
  // Throws Error(protocol) for a COMM_OPEN that no correct peer sends.
  void check(const CommOpenFrame& frame, const HelloFrame& hello) const;
  // The reason not to open the pair at this end; empty when there is none.
  [[nodiscard]] std::string refusal(const CommOpenFrame& frame, const HelloFrame& hello,
                                    const Lane* lane) const;
  // Connector, then a thread of its own, then the connector again.
  void begin_opening(const PairPtr& pair);
  void make(const PairPtr& pair);
  void poll_opening(const PairPtr& pair, Clock::time_point deadline);
  void order_if_ready(const PairPtr& pair);
  // Lane.
  void begin_test(const PairPtr& pair);
  [[nodiscard]] Lane::Watch launch(const PairPtr& pair, std::uint64_t number);
  [[nodiscard]] Lane::Watch issue(const PairPtr& pair, std::uint64_t number, void* memory,
                                  std::size_t bytes, bool to_sink);
  void issued(const PairPtr& pair, std::uint64_t number);
  void launch_done(const PairPtr& pair, std::uint64_t number, cuda::Status status);
  [[nodiscard]] void* test_memory(NcclPair& pair);
  void test_arrived(const PairPtr& pair);
  // Breaks the pair for an error of NCCL.
  void fail(const PairPtr& pair, nccl::Result result, const char* what);
  // Nothing of the pair works on that transfer any more, or its abort is stuck.
  void drop(const PairPtr& pair, TransferId id, const std::optional<Error>& stuck);
  void retire(const PairPtr& pair);   // aborts the kernels of the pair
  void retired(const PairPtr& pair);  // lane: the kernels have been told to end
  void on_abort_stuck(const PairPtr& pair);
  void watch();

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
