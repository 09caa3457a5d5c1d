// One transfer over a two-rank communicator: announced, agreed on, launched in the order of the
// lane, seen done by the host.

#include <algorithm>
#include <string>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/transport/gpu/device_transfers_impl.h"

namespace stitch::transport::gpu {
namespace {

constexpr std::size_t kTestBytes = 4096;
constexpr std::chrono::nanoseconds kStallPerByte(10);  // 100 MB/s
// What has no memory is received in pieces, up to so many: the lane makes a call for each.
constexpr std::size_t kMaxSunkPieces = std::size_t{1} << 16;
constexpr std::chrono::milliseconds kAskAgain(1);

// A size is what a peer says, up to 2^63.
std::chrono::nanoseconds stall_time(std::size_t bytes) {
  constexpr std::size_t kMax = std::chrono::nanoseconds::max().count() / 100;
  return kStallPerByte * static_cast<std::chrono::nanoseconds::rep>(std::min(bytes, kMax));
}

// Differs between epochs, so that what is left of an earlier test does not pass.
int test_pattern(const NcclPair& pair) { return static_cast<int>(0x5a ^ (pair.name.epoch & 0xff)); }

}  // namespace

// --- agreeing ---

bool DeviceTransfers::Impl::announce_nccl(const OutgoingPtr& transfer, const PairPtr& pair) {
  RtsFrame rts;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->ended) return true;
    if (pair == nullptr || pair->state != NcclPair::State::open) return false;
    const auto clock = pair->lane->announce(pair->token, transfer->id).clock;
    if (!clock) return false;
    transfer->path = Path::nccl;
    transfer->announced = true;
    transfer->pair = pair;
    pair->used = Clock::now();
    transfer->reading = true;
    rts.id = transfer->id;
    rts.path = Path::nccl;
    rts.pair = pair->name;
    rts.bytes = transfer->source.bytes;
    rts.clock = *clock;
  }
  start_ticking();
  send_frame(transfer->to, encode(rts));
  return true;
}

// No CUDA call here: whatever the device does, the source gets its answer.
void DeviceTransfers::Impl::start_nccl(const IncomingPtr& transfer, const RtsFrame& rts) {
  Lane::Entered entered;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->ended) return;
    const PairPtr pair = find_pair(transfer->from, End::destination, rts.pair);
    if (pair != nullptr && pair->ordered && pair->state != NcclPair::State::broken) {
      entered = pair->lane->accept(pair->token, rts.id, rts.clock);
      if (entered.clock) transfer->pair = pair;
    }
  }
  if (entered.clock) {
    send_frame(transfer->from, encode(CtsFrame{rts.id, rts.pair, *entered.clock}));
  } else {
    retry(transfer, entered.held);
  }
}

// The destination's device is held; it has not entered the transfer in its order.
void DeviceTransfers::Impl::on_decline(PeerId from, const DeclineFrame& frame) {
  OutgoingPtr transfer;
  PairPtr pair;
  {
    const base::MutexLock lock(mutex_);
    transfer = find_outgoing(from, frame.id);
    if (transfer == nullptr) return;
    pair = transfer->pair;
    if (pair != nullptr && pair->lane->withdraw(pair->token, frame.id)) {
      transfer->pair.reset();
      transfer->reading = false;
    }
  }
  on_retry(from, frame.id, "DECLINE");
}

void DeviceTransfers::Impl::accept_test(PeerId from, const RtsFrame& rts, bool again) {
  CtsFrame cts;
  PairPtr later;
  {
    const base::MutexLock lock(mutex_);
    const PairPtr pair = find_pair(from, End::destination, rts.pair);
    if (pair == nullptr || !pair->ordered) return;  // its source hears of a BREAK
    if (pair->tested || pair->test_waits != again) {
      throw Error(ErrorCode::protocol, "second test of a communicator from device " +
                                           std::to_string(rts.pair.source_device) + " to device " +
                                           std::to_string(rts.pair.destination_device));
    }
    const auto [clock, held] = pair->lane->accept(pair->token, 0, rts.clock);
    pair->tested = clock.has_value();
    pair->test_waits = held;
    if (clock) {
      cts = {0, rts.pair, *clock};
    } else if (held) {
      later = pair;
    } else {
      return;
    }
  }
  if (later == nullptr) return send_frame(from, encode(cts));
  // Answered once nothing holds the device, unless the source has given up by then.
  lanes_.connector().post_at(base::deadline_after(kAskAgain),
                             [self = shared_from_this(), from, rts, later] {
                               try {
                                 self->accept_test(from, rts, true);
                               } catch (const Error& error) {
                                 self->break_pair(later, error, true);
                               }
                             });
}

void DeviceTransfers::Impl::on_cts(PeerId from, const CtsFrame& frame) {
  const base::MutexLock lock(mutex_);
  const PairPtr pair = find_pair(from, End::source, frame.pair);
  if (pair == nullptr || !pair->ordered) return;
  (void)pair->lane->agree(pair->token, frame.id, frame.clock);
}

// --- launching ---

Lane::Watch DeviceTransfers::Impl::launch(const PairPtr& pair, std::uint64_t number) {
  Lane& lane = *pair->lane;
  OutgoingPtr outgoing;
  IncomingPtr incoming;
  bool is_broken = false;
  {
    const base::MutexLock lock(mutex_);
    is_broken = pair->state == NcclPair::State::broken;
    if (!is_broken) {
      std::size_t bytes = kTestBytes;
      NcclPair::Launched& launched = pair->launched[number];
      if (number != 0 && pair->end == End::source) {
        outgoing = find_outgoing(pair->peer, number);
        launched.owner = outgoing;
        if (outgoing != nullptr) bytes = outgoing->source.bytes;
      } else if (number != 0) {
        incoming = find_incoming(pair->peer, number);
        launched.owner = incoming;
        if (incoming != nullptr) bytes = incoming->bytes;
      }
      launched.limit = options_.stall_timeout + stall_time(bytes);
      launched.order = ++launches_;
      launched.deadline = base::deadline_after(launched.limit);
    }
  }
  if (is_broken) {
    lane.finish(pair->token);
    leave_pair(pair, number);
    return nullptr;
  }
  start_ticking();
  // One that could not be set up has no streams, and another device may be current here.
  if (lane.failure()) {
    break_pair(pair, *lane.failure(), true);
    return nullptr;
  }
  void* memory = nullptr;
  std::size_t bytes = kTestBytes;
  bool to_sink = false;
  if (number == 0) {
    memory = test_memory(*pair);
  } else if (outgoing != nullptr) {
    memory = outgoing->source.data;
    bytes = outgoing->source.bytes;
  } else if (incoming != nullptr) {
    bytes = incoming->bytes;
    to_sink = !allocate(incoming, lane.receives());
    memory = !to_sink                                     ? incoming->memory.data
             : bytes / pair->piece_bytes < kMaxSunkPieces ? lane.sink()
                                                          : nullptr;
  }
  if (memory == nullptr) {
    break_pair(pair,
               Error(ErrorCode::overloaded, "no memory for transfer " + std::to_string(number)),
               true);
    return nullptr;
  }
  const nccl::Result result = issue(*pair, memory, bytes, to_sink);
  if (result != nccl::kSuccess && result != nccl::kInProgress) {
    break_pair(pair, nccl_error(*pair, result, "transfer cannot be launched"), true);
    return nullptr;
  }
  // An event recorded before the background has launched would be early.
  return [self = shared_from_this(), pair, number] {
    if (self->broken(*pair)) return true;
    const nccl::Result state = self->async_error(*pair);
    if (state == nccl::kInProgress) return false;
    if (state == nccl::kSuccess) {
      self->guarded(pair, [&] { self->issued(pair, number); });
    } else {
      self->break_pair(pair, self->nccl_error(*pair, state, "transfer cannot be launched"), true);
    }
    return true;
  };
}

// Something was thrown in the middle of launch(), for want of memory.
void DeviceTransfers::Impl::not_launched(const PairPtr& pair, std::uint64_t number,
                                         const Error& why) {
  bool counted = false;
  {
    const base::MutexLock lock(mutex_);
    counted = pair->launched.contains(number);
  }
  break_pair(pair, why, true);
  if (counted) return;  // retired() ends it
  pair->lane->finish(pair->token);
  leave_pair(pair, number);
}

void* DeviceTransfers::Impl::test_memory(NcclPair& pair) {
  const CudaApi& cuda = lanes_.cuda();
  void* bytes = nullptr;
  cuda::Status status = cuda.malloc(&pair.test_memory, kTestBytes);
  if (status == cuda::kSuccess && pair.end == End::source) {
    status =
        cuda.memset_async(pair.test_memory, test_pattern(pair), kTestBytes, pair.lane->sends());
  } else if (status == cuda::kSuccess) {
    status = cuda.host_alloc(&bytes, kTestBytes, cuda::kHostAllocPortable);
    pair.test_bytes = static_cast<std::byte*>(bytes);
    (void)pair.lane->sink();  // while there is memory
  } else {
    pair.test_memory = nullptr;
  }
  if (status == cuda::kSuccess) return pair.test_memory;
  (void)pair.lane->error_of(status, "no memory to test NCCL");
  return nullptr;
}

nccl::Result DeviceTransfers::Impl::async_error(NcclPair& pair) const {
  const base::MutexLock lock(pair.comm_mutex);
  if (pair.comm_gone) return nccl::kRemoteError;
  nccl::Result state = nccl::kSuccess;
  const nccl::Result asked = lanes_.nccl().comm_get_async_error(pair.comm, &state);
  return asked != nccl::kSuccess ? asked : state;
}

nccl::Result DeviceTransfers::Impl::issue(NcclPair& pair, void* memory, std::size_t bytes,
                                          bool to_sink) {
  const NcclApi& nccl = lanes_.nccl();
  const base::MutexLock lock(pair.comm_mutex);
  if (pair.comm_gone) return nccl::kRemoteError;
  nccl::Result result = nccl.group_start();
  if (result != nccl::kSuccess) return result;
  nccl::Result worst = nccl::kSuccess;
  for (std::size_t at = 0; at < bytes && worst == nccl::kSuccess; at += pair.piece_bytes) {
    const std::size_t piece = std::min(pair.piece_bytes, bytes - at);
    std::byte* const part = static_cast<std::byte*>(memory) + (to_sink ? 0 : at);
    result = pair.end == End::source
                 ? nccl.send(part, piece, nccl::kInt8, 1, pair.comm, pair.lane->sends())
                 : nccl.recv(part, piece, nccl::kInt8, 0, pair.comm, pair.lane->receives());
    if (result != nccl::kSuccess && result != nccl::kInProgress) worst = result;
  }
  result = nccl.group_end();
  return worst != nccl::kSuccess ? worst : result;
}

void DeviceTransfers::Impl::issued(const PairPtr& pair, std::uint64_t number) {
  Lane& lane = *pair->lane;
  if (number == 0 && pair->end == End::destination) {
    const cuda::Status status = lanes_.cuda().memcpy_async(
        pair->test_bytes, pair->test_memory, kTestBytes, cuda::kDeviceToHost, lane.receives());
    if (status != cuda::kSuccess) {
      return break_pair(pair, lane.error_of(status, "NCCL cannot be tested"), true);
    }
  }
  lane.when_done(pair->end == End::source ? lane.sends() : lane.receives(),
                 [self = shared_from_this(), pair, number](cuda::Status status) {
                   self->guarded(pair, [&] { self->launch_done(pair, number, status); });
                 });
}

void DeviceTransfers::Impl::launch_done(const PairPtr& pair, std::uint64_t number,
                                        cuda::Status status) {
  Lane& lane = *pair->lane;
  if (broken(*pair)) return;  // retired() ends it
  if (status != cuda::kSuccess) {
    return break_pair(pair, lane.error_of(status, "NCCL transfer"), true);
  }
  const nccl::Result state = async_error(*pair);
  if (state != nccl::kSuccess && state != nccl::kInProgress) {
    return break_pair(pair, nccl_error(*pair, state, "transfer"), true);
  }
  OutgoingPtr outgoing;
  IncomingPtr incoming;
  {
    const base::MutexLock lock(mutex_);
    if (pair->state == NcclPair::State::broken) return;
    pair->launched.erase(number);
    pair->peer_waits.reset();
    extend_deadlines(lane, pair->end);
    if (number != 0 && pair->end == End::source) {
      outgoing = find_outgoing(pair->peer, number);
      if (outgoing != nullptr) outgoing->reading = false;
    } else if (number != 0) {
      incoming = find_incoming(pair->peer, number);
    }
  }
  lane.finish(pair->token);
  if (outgoing != nullptr) end_if_settled(outgoing);
  if (incoming != nullptr) finish(incoming, incoming->no_memory);
  if (number == 0 && pair->end == End::destination) test_arrived(pair);
}

void DeviceTransfers::Impl::test_arrived(const PairPtr& pair) {
  const auto expected = static_cast<std::byte>(test_pattern(*pair));
  if (!std::all_of(pair->test_bytes, pair->test_bytes + kTestBytes,
                   [expected](std::byte byte) { return byte == expected; })) {
    return break_pair(pair, Error(ErrorCode::internal, "NCCL moved wrong bytes in its test"), true);
  }
  {
    const base::MutexLock lock(mutex_);
    if (pair->state != NcclPair::State::testing) return;
    pair->state = NcclPair::State::open;
  }
  FinishedFrame frame;
  frame.pair = pair->name;
  send_frame(pair->peer, encode(frame));
}

}  // namespace stitch::transport::gpu
