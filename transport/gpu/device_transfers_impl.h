#pragma once

// One file, though long: the methods of one class, grouped by the files that they are in.

#include <chrono>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/transport/gpu/device_transfers.h"
#include "stitch/transport/gpu/lane.h"
#include "stitch/transport/gpu/lanes.h"
#include "stitch/transport/gpu/transfer_frames.h"

namespace stitch::transport::gpu {

// One direction between two devices of two workers in one epoch: a two-rank communicator, in which
// the source is rank 0. Fields without a remark are constant once it is in a table.
struct NcclPair {
  enum class State : std::uint8_t { opening, testing, open, broken };

  PairName name;
  PeerId peer = 0;
  TransferOrder::End end = TransferOrder::End::source;
  TransferOrder::Pair token = 0;
  Lane* lane = nullptr;
  std::size_t piece_bytes = 0;
  nccl::UniqueId unique_id{};

  // Guarded by the lock of the transfers.
  State state = State::opening;
  bool being_made = false;   // on a thread of its own, which alone uses `comm` then
  bool initialized = false;  // here
  bool peer_ready = false;
  bool tested = false;      // destination: its test was announced, and entered in the order
  bool test_waits = false;  // destination: it was announced, and waits for who holds the device
  std::chrono::steady_clock::time_point used{};  // source: last by a transfer
  bool ordered = false;  // in the lane's order; then the lane uses `comm`, before the connector
  std::optional<Error> why;
  struct Launched {
    std::shared_ptr<void> owner;       // keeps the memory alive
    std::uint64_t order = 0;           // of all launches
    std::chrono::nanoseconds limit{};  // from when the stream has done what is before it
    std::chrono::steady_clock::time_point deadline;
  };
  std::map<std::uint64_t, Launched> launched;  // and not finished
  bool aborted = false;
  std::chrono::steady_clock::time_point told_waits{};  // when the peer was last told that it waits
  // Since when the peer has said that, while none of them is done.
  std::optional<std::chrono::steady_clock::time_point> peer_waits;

  nccl::Result made = nccl::kSuccess;  // how it went; of that thread, then of the connector
  // Of the connector until it is ordered, but while it is being made. Then the lane calls it under
  // `comm_mutex`, and not once `comm_gone` is set: a lane that is blocked in a CUDA call, maybe
  // until this very communicator is aborted, does not delay that.
  nccl::Comm comm = nullptr;
  base::Mutex comm_mutex;  // after the lock of the transfers; held for calls that do not block
  bool comm_gone STITCH_GUARDED_BY(comm_mutex) = false;

  void* test_memory = nullptr;      // of the lane
  std::byte* test_bytes = nullptr;  // of the lane; pinned
};

// What owns device memory is released on a lane: that may wait for the device.
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

  // Guarded by the lock of the transfers.
  DeviceTransfers::Done done;
  Path path = Path::staging;
  bool announced = false;
  bool retried = false;
  bool ended = false;
  std::shared_ptr<NcclPair> pair;
  std::uint64_t granted = 0;              // chunks, by staging
  std::uint64_t data_sent = 0;            // those that were sent
  bool reading = false;                   // a launch of this end reads it or will
  std::optional<FinishedFrame> finished;  // what the destination said

  // Of the lane.
  std::uint64_t offset = 0;  // of the next chunk to copy
};

struct Incoming {
  Incoming() = default;
  Incoming(const Incoming&) = delete;
  Incoming& operator=(const Incoming&) = delete;
  ~Incoming();

  PeerId from = 0;
  TransferId id = 0;

  // Guarded by the lock of the transfers.
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
  std::shared_ptr<NcclPair> pair;
  std::vector<std::byte*> granted;  // slots that the source may fill
  std::vector<bool> chunks;         // those that have arrived

  // Of the lane.
  DeviceMemory memory;
  std::optional<Error> no_memory;  // the bytes go into the sink
  std::size_t asked = 0;           // chunks for which a slot was asked for
  std::size_t written = 0;         // chunks in the memory
};

// What DeviceTransfers consists of. Frames are handled on the thread that brings them, and no CUDA
// call is made there; everything else happens on lanes. Methods are grouped by file.
class DeviceTransfers::Impl : public std::enable_shared_from_this<Impl> {
 public:
  explicit Impl(Options options);

  // --- device_transfers.cc ---
  TransferId new_id();
  void send(TransferId id, PeerId to, int to_device, DeviceSpan source, cuda::Event ready,
            std::shared_ptr<const void> keep_alive, Done done);
  void receive(PeerId from, TransferId id, int device, std::size_t bytes, Allocate allocate,
               Arrived arrived, Adopt adopt);
  void refuse(PeerId from, TransferId id, const Error& why);
  // --- path_counts.cc ---
  [[nodiscard]] Counters counters() const;
  [[nodiscard]] std::size_t under_way() const;
  // --- transfers_ending.cc ---
  void on_peer_lost(PeerId peer, const Error& why);
  void shutdown(std::chrono::steady_clock::time_point deadline);
  // --- peer_frames.cc ---
  void on_frame(PeerId from, std::span<const std::byte> frame);

 private:
  using Clock = std::chrono::steady_clock;
  using OutgoingPtr = std::shared_ptr<Outgoing>;
  using IncomingPtr = std::shared_ptr<Incoming>;
  using PairPtr = std::shared_ptr<NcclPair>;
  using End = TransferOrder::End;
  // (peer, which end this worker is, source device, destination device)
  using SlotKey = std::tuple<PeerId, End, std::uint32_t, std::uint32_t>;
  struct PairSlot {
    std::uint64_t epoch = 0;  // of the last pair
    PairPtr pair;             // null: there is none that is not broken
    PathPause pause;
    std::vector<PairPtr> accepted{};  // destination: those that may not have ended yet
  };
  struct Peer {
    bool hello_sent = false;
    std::optional<HelloFrame> hello;
    std::optional<Error> lost;
    // Transfers that it announced and that receive() did not ask for, and those that were refused
    // before they were announced.
    std::size_t unasked = 0;
    unsigned said = 0;               // reasons that were said, by bit
    std::size_t unacknowledged = 0;  // transfers that have arrived and were not dealt with yet
    // Once watch_peers() has seen that transfers with it are under way: when it was last told so.
    std::optional<Clock::time_point> told;
    // Once it owes something: for how long this process has listened without hearing of it.
    std::optional<std::chrono::nanoseconds> silent;
  };
  // Marks a call out of this object; false when it is closed and must not call out any more.
  class CallOut {
   public:
    explicit CallOut(Impl& impl) : impl_(impl), open_(impl.begin_call()) {}
    ~CallOut() {
      if (open_) impl_.end_call();
    }
    CallOut(const CallOut&) = delete;
    CallOut& operator=(const CallOut&) = delete;
    explicit operator bool() const noexcept { return open_; }

   private:
    Impl& impl_;
    const bool open_;
  };
  bool begin_call();
  void end_call();

  // --- device_transfers.cc ---
  void send_frame(PeerId to, base::Bytes frame);
  bool end(const OutgoingPtr& transfer, std::optional<Error> error);  // now, and `to` is not lost
  enum class RefuseLater : std::uint8_t { no, if_retried, yes };      // once it is announced
  // Whether it has ended now, announced by its source.
  bool end(const IncomingPtr& transfer, std::optional<Error> error,
           std::shared_ptr<void> acknowledgment = nullptr,
           RefuseLater refuse_later = RefuseLater::no);
  void call_on(Lane& lane, Done done, std::optional<Error> error);  // then end_call()
  [[nodiscard]] bool is_lost(PeerId peer) const;
  // The destination's end: ends the transfer and tells the source, without an error once the
  // acknowledgment has no owner any more.
  void finish(const IncomingPtr& transfer, std::optional<Error> error, bool refuse_later = false);
  // The source's end of a transfer whose bytes will not come.
  void cancel(const OutgoingPtr& transfer, const Error& error);
  // What a step of a transfer throws on a lane, for want of memory, ends that transfer, or breaks
  // that pair; if that cannot be done either, its peer or a timer has to.
  template <class Owner, class Step>
  void guarded(const Owner& owner, Step&& step) noexcept {
    try {
      step();
    } catch (...) {
      fail(owner, std::current_exception());
    }
  }
  void fail(const OutgoingPtr& transfer, const std::exception_ptr& exception) noexcept;
  void fail(const IncomingPtr& transfer, const std::exception_ptr& exception) noexcept;
  void fail(const PairPtr& pair, const std::exception_ptr& exception) noexcept;
  // The step as a task or a callback of a lane or the connector.
  template <class Owner, class Step>
  [[nodiscard]] auto on_lane(const Owner& owner, Step step) {
    return [self = shared_from_this(), owner, step = std::move(step)](auto... arguments) mutable {
      self->guarded(owner, [&] { step(arguments...); });
    };
  }
  [[nodiscard]] OutgoingPtr find_outgoing(PeerId to, TransferId id) const STITCH_REQUIRES(mutex_);
  // The transfer that the layer above asks for or refuses now. Throws Error(protocol) if it did so
  // before.
  [[nodiscard]] IncomingPtr ask_for(PeerId from, TransferId id) STITCH_REQUIRES(mutex_);
  [[nodiscard]] IncomingPtr find_incoming(PeerId from, TransferId id) const STITCH_REQUIRES(mutex_);

  // --- path_counts.cc ---
  void count(PeerId peer, int device, Path path, bool sent, std::size_t bytes)
      STITCH_REQUIRES(mutex_);
  // The path of a transfer of this end has brought its bytes.
  void path_worked(const Outgoing& transfer) STITCH_REQUIRES(mutex_);
  // A path of this device has been refused, or has broken.
  void path_failed(PeerId peer, int device, Path path, const char* why) STITCH_REQUIRES(mutex_);
  // Once for each peer and kind of reason: a path by its number, or one of these.
  static constexpr unsigned kVersions = kPaths;
  static constexpr unsigned kQuarantine = kPaths + 1;
  void say_versions(PeerId peer, int theirs) STITCH_REQUIRES(mutex_);
  void say(PeerId peer, unsigned reason, std::initializer_list<std::string_view> parts) noexcept
      STITCH_REQUIRES(mutex_);
  [[nodiscard]] int own_nccl() const { return options_.use_nccl ? lanes_.nccl_version() : 0; }

  // --- transfer_events.cc ---
  void begin(const OutgoingPtr& transfer);  // lane: its bytes are there
  [[nodiscard]] PathChoice choose(const Outgoing& transfer) STITCH_REQUIRES(mutex_);
  void start(const IncomingPtr& transfer);  // it is announced and asked for
  // Lane. False: it has ended, or there is no memory for it (Incoming::no_memory).
  bool allocate(const IncomingPtr& transfer, cuda::Stream stream);
  void check_unasked(Peer& peer) STITCH_REQUIRES(mutex_);
  // Asks its source to send it again, by staging. `held`: this device is, and the pair lives.
  void retry(const IncomingPtr& transfer, bool held = false);
  void on_rts(PeerId from, const RtsFrame& frame);
  void on_retry(PeerId from, TransferId id, const char* frame);  // RETRY or DECLINE
  void on_finished(PeerId from, const FinishedFrame& frame);
  void on_cancel(PeerId from, const CancelFrame& frame);
  void on_forget(PeerId from, const ForgetFrame& frame);
  void end_if_settled(const OutgoingPtr& transfer);

  // --- peer_frames.cc ---
  void on_hello(PeerId from, HelloFrame hello);

  // --- silence.cc ---
  // Tells peers that transfers with them are under way, and ends those with peers that do not. On
  // the connector, as long as there are any.
  void start_watching();
  void watch_peers(Clock::time_point begun, std::chrono::nanoseconds interval);
  void end_silent(PeerId peer);

  // --- staged_path.cc ---
  void start_staged(const IncomingPtr& transfer);
  void ask_for_slot(const IncomingPtr& transfer);
  void on_grant(PeerId from, const GrantFrame& frame);
  void send_chunk(const OutgoingPtr& transfer);
  void on_data(PeerId from, const DataFrame& frame);
  void write_chunk(const IncomingPtr& transfer, std::byte* slot, std::uint64_t offset,
                   std::size_t bytes);

  // --- local_path.cc ---
  // `key`: of the offer, as RTS says it.
  void start_local(const IncomingPtr& transfer, std::uint64_t key);
  // Lane. Whether the destination has taken the memory itself.
  [[nodiscard]] bool adopt(const IncomingPtr& transfer, const Lanes::LocalSource& source);
  void test_peer_copies(PeerId to, int source, int destination);
  void peer_copies_failed(PeerId peer, int device, int source, int destination, const char* why);

  // --- nccl_pairs.cc ---
  [[nodiscard]] PathState nccl_state(const PairSlot& slot, int device) const;
  void open_pair(const PairPtr& pair);  // connector
  // A thread of its own: makes the communicator, which may wait for the device. False: the pair was
  // broken meanwhile, and the communicator has been aborted.
  [[nodiscard]] bool make_comm(const PairPtr& pair);
  void comm_made(const PairPtr& pair, Clock::time_point deadline);  // connector
  void poll_opening(const PairPtr& pair, Clock::time_point deadline);
  void order_if_ready(const PairPtr& pair);
  void begin_test(const PairPtr& pair);
  void on_comm_open(PeerId from, const CommOpenFrame& frame);
  void on_comm_ready(PeerId from, const CommReadyFrame& frame);
  void on_comm_break(PeerId from, const CommBreakFrame& frame);
  void on_test_finished(PeerId from, const FinishedFrame& frame);
  [[nodiscard]] PairPtr find_pair(PeerId peer, End end, const PairName& name) const
      STITCH_REQUIRES(mutex_);
  void break_pair(const PairPtr& pair, const Error& why, bool tell);
  // As that, but nothing has failed: it makes room for another one.
  void close_unused(const PairPtr& pair);
  void end_pair(const PairPtr& pair, const Error& why, bool tell, bool unused);
  // Source: whether there may be one more from that device. `unused` is to be closed for it.
  [[nodiscard]] bool has_room(const Lane& lane, PairPtr& unused) const STITCH_REQUIRES(mutex_);
  void retire(const PairPtr& pair);   // aborts what the pair runs on the device
  void abort(const PairPtr& pair);    // again after a while, where the system gives no thread
  void retired(const PairPtr& pair);  // lane: nothing of the pair runs on the device any more
  void leave_pair(const PairPtr& pair, std::uint64_t number);
  void on_abort_stuck(const PairPtr& pair);

  // --- nccl_path.cc ---
  bool announce_nccl(const OutgoingPtr& transfer, const PairPtr& pair);
  void start_nccl(const IncomingPtr& transfer, const RtsFrame& rts);
  void accept_test(PeerId from, const RtsFrame& rts, bool again = false);
  void on_cts(PeerId from, const CtsFrame& frame);
  void on_decline(PeerId from, const DeclineFrame& frame);
  Lane::Watch launch(const PairPtr& pair, std::uint64_t number);
  void not_launched(const PairPtr& pair, std::uint64_t number, const Error& why);
  // Lane. kRemoteError once the communicator is being aborted.
  [[nodiscard]] nccl::Result async_error(NcclPair& pair) const;
  [[nodiscard]] nccl::Result issue(NcclPair& pair, void* memory, std::size_t bytes, bool to_sink);
  void issued(const PairPtr& pair, std::uint64_t number);
  void launch_done(const PairPtr& pair, std::uint64_t number, cuda::Status status);
  // Lane. Memory to test the pair with, filled at the source; null when there is none.
  [[nodiscard]] void* test_memory(NcclPair& pair);
  void test_arrived(const PairPtr& pair);

  // --- nccl_stalls.cc ---
  // Breaks the pairs whose CTS are late and whose launches stall, on the connector: a lane may be
  // blocked until that happens. Tells the peers of those that only wait behind these.
  void start_ticking();
  void tick();
  void on_comm_waits(PeerId from, const CommWaitsFrame& frame);
  // What it has launched has its time from now on.
  static void extend_deadlines(NcclPair& pair);
  // The stream of that end on that lane has come further: so has all that is behind.
  void extend_deadlines(const Lane& lane, End end) STITCH_REQUIRES(mutex_);

  [[nodiscard]] Error nccl_error(NcclPair& pair, nccl::Result result,
                                 const std::string& what) const;
  [[nodiscard]] bool broken(const NcclPair& pair) const;

  Lanes& lanes_;
  const Options options_;  // without the lanes
  const std::uint64_t uid_;

  mutable base::Mutex mutex_;
  base::CondVar changed_;
  bool closing_ STITCH_GUARDED_BY(mutex_) = false;
  bool closed_ STITCH_GUARDED_BY(mutex_) = false;
  std::size_t calls_ STITCH_GUARDED_BY(mutex_) = 0;
  TransferId last_id_ STITCH_GUARDED_BY(mutex_) = 0;
  std::map<PeerId, Peer> peers_ STITCH_GUARDED_BY(mutex_);
  std::map<TransferId, OutgoingPtr> outgoing_ STITCH_GUARDED_BY(mutex_);
  std::map<std::pair<PeerId, TransferId>, IncomingPtr> incoming_ STITCH_GUARDED_BY(mutex_);
  std::map<SlotKey, PairSlot> slots_ STITCH_GUARDED_BY(mutex_);
  std::map<TransferOrder::Pair, PairPtr> ordered_ STITCH_GUARDED_BY(mutex_);  // by token
  // Broken ones whose launches are on the device until their abort has returned.
  std::map<TransferOrder::Pair, PairPtr> retiring_ STITCH_GUARDED_BY(mutex_);
  std::map<std::tuple<PeerId, int, Path, bool>, PathCount> counts_ STITCH_GUARDED_BY(mutex_);
  std::map<std::tuple<PeerId, int, Path>, std::uint64_t> failures_ STITCH_GUARDED_BY(mutex_);
  std::uint64_t breaks_ STITCH_GUARDED_BY(mutex_) = 0;
  std::uint64_t launches_ STITCH_GUARDED_BY(mutex_) = 0;
  std::uint64_t silences_ STITCH_GUARDED_BY(mutex_) = 0;
  std::uint64_t retries_ STITCH_GUARDED_BY(mutex_) = 0;
  bool ticking_ STITCH_GUARDED_BY(mutex_) = false;
  bool watching_ STITCH_GUARDED_BY(mutex_) = false;
};

}  // namespace stitch::transport::gpu
