// One file, though long: each step of a communicator depends on those before it.
#include "stitch/transport/gpu/communicators.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/transport/gpu/own_thread.h"
#include "stitch/transport/gpu/transfers.h"

namespace stitch::transport::gpu {
namespace {

constexpr std::chrono::milliseconds kPollInterval(1);
constexpr std::chrono::milliseconds kMinWatchInterval(1);
constexpr std::chrono::milliseconds kMaxWatchInterval(100);
// Of one name and not aborted yet: a source that breaks and opens faster waits for its pause.
constexpr std::size_t kMaxUnfinished = 4;
constexpr std::size_t kMinPieceBytes = 4096;
constexpr std::size_t kMaxPieceBytes = Lane::kSinkBytes;
constexpr std::size_t kTestBytes = 4096;
constexpr std::chrono::nanoseconds kStallPerByte(10);  // 100 MB/s
// What has no memory is received in pieces, up to so many: the lane makes a call for each.
constexpr std::size_t kMaxSunkPieces = std::size_t{1} << 16;

// A size is what a peer says, up to 2^63.
std::chrono::nanoseconds stall_time(std::size_t bytes) {
  constexpr std::size_t kMax = std::chrono::nanoseconds::max().count() / 100;
  return kStallPerByte * static_cast<std::chrono::nanoseconds::rep>(std::min(bytes, kMax));
}

// Differs between epochs, so that what is left of an earlier test does not pass.
int test_pattern(const NcclPair& pair) { return static_cast<int>(0x5a ^ (pair.name.epoch & 0xff)); }

std::uint8_t from_source(const NcclPair& pair) {
  return pair.end == TransferOrder::End::source ? 1 : 0;
}

}  // namespace

Communicators::Communicators(Transfers& transfers)
    : transfers_(transfers), lanes_(transfers.lanes()), options_(transfers.options()) {}

std::shared_ptr<Transfers> Communicators::kept() const { return transfers_.shared_from_this(); }

PairPtr Communicators::find(PeerId peer, End end, const PairName& name) const {
  const auto at = slots_.find({peer, end, name.source_device, name.destination_device});
  if (at == slots_.end() || at->second.pair == nullptr) return nullptr;
  return at->second.pair->name == name ? at->second.pair : nullptr;
}

bool Communicators::broken(const NcclPair& pair) const {
  const base::MutexLock lock(mutex_);
  return pair.state == NcclPair::State::broken;
}

Error Communicators::error_of(NcclPair& pair, nccl::Result result, const std::string& what) const {
  const base::MutexLock lock(pair.comm_mutex);
  const char* const last = pair.comm_gone ? nullptr : lanes_.nccl().get_last_error(pair.comm);
  return Error(ErrorCode::internal,
               "NCCL between device " + std::to_string(pair.name.source_device) + " and device " +
                   std::to_string(pair.name.destination_device) + ": " + what + ": " +
                   lanes_.nccl().get_error_string(result) + (last == nullptr ? "" : ": ") +
                   (last == nullptr ? "" : last));
}

// --- which there are ---

const Communicators::Slot* Communicators::source_slot(PeerId to, int device, int to_device) const {
  const auto at = slots_.find(
      {to, End::source, static_cast<std::uint32_t>(device), static_cast<std::uint32_t>(to_device)});
  return at == slots_.end() ? nullptr : &at->second;
}

PathState Communicators::state(PeerId to, int device, int to_device) const {
  if (transfers_.own_nccl() == 0 || lanes_.quarantined(device) || lanes_.held(device)) {
    return PathState::closed;
  }
  const base::MutexLock lock(mutex_);
  const Slot* const slot = source_slot(to, device, to_device);
  if (slot == nullptr) return PathState::untried;
  if (slot->pair == nullptr) return slot->pause.over() ? PathState::untried : PathState::closed;
  return slot->pair->state == NcclPair::State::open ? PathState::open : PathState::opening;
}

void Communicators::worked(PeerId to, int device, int to_device) {
  const base::MutexLock lock(mutex_);
  const auto at = slots_.find(
      {to, End::source, static_cast<std::uint32_t>(device), static_cast<std::uint32_t>(to_device)});
  if (at != slots_.end()) at->second.pause.success();
}

bool Communicators::has_room(const Lane& lane, PairPtr& unused) const {
  std::size_t count = 0;
  const auto before = Clock::now() - options_.unused_time;
  for (const auto& [key, slot] : slots_) {
    if (std::get<1>(key) != End::source || slot.pair == nullptr || slot.pair->lane != &lane)
      continue;
    ++count;
    const PairPtr& pair = slot.pair;
    if (pair->state != NcclPair::State::open || pair->under_way > 0 || pair->used > before)
      continue;
    if (unused == nullptr || pair->used < unused->used) unused = pair;
  }
  if (count >= options_.max_communicators) return unused != nullptr;
  unused.reset();
  return true;
}

void Communicators::add_to(DeviceTransfers::Counters& counters) const {
  const base::MutexLock lock(mutex_);
  for (const auto& [key, slot] : slots_) {
    if (std::get<1>(key) == End::source && slot.pair == nullptr && !slot.pause.over())
      ++counters.paused;
  }
  for (const auto& [token, pair] : ordered_) ++counters.communicators[pair->lane->device()];
  counters.breaks = breaks_;
}

// --- opening ---

void Communicators::open(PeerId to, Lane& lane, int to_device) {
  PairPtr pair;
  PairPtr unused;
  {
    const base::MutexLock lock(mutex_);
    Slot& slot = slots_[{to, End::source, static_cast<std::uint32_t>(lane.device()),
                         static_cast<std::uint32_t>(to_device)}];
    if (closed_ || lost_.contains(to) || slot.pair != nullptr || !has_room(lane, unused)) return;
    pair = std::make_shared<NcclPair>();
    pair->name = {static_cast<std::uint32_t>(lane.device()), static_cast<std::uint32_t>(to_device),
                  ++slot.epoch};
    pair->peer = to;
    pair->end = End::source;
    pair->source_uid = transfers_.uid();
    pair->token = lanes_.new_pair();
    pair->lane = &lane;
    pair->piece_bytes = options_.nccl_piece_bytes;
    pair->used = Clock::now();
    slot.pair = pair;
  }
  if (unused != nullptr) end_pair(unused, Error(ErrorCode::cancelled, ""), true, true);
  lanes_.connector().post([this, self = kept(), pair] { begin_opening(pair); });
}

// To make a communicator NCCL initializes CUDA and allocates, also where it does not block for its
// peer: that may wait for the device, and the device for a transfer that a time limit has to end,
// which the connector looks at.
void Communicators::begin_opening(const PairPtr& pair) {
  const auto deadline = base::deadline_after(options_.open_timeout);
  {
    const base::MutexLock lock(mutex_);
    if (pair->state == NcclPair::State::broken) return;
    pair->being_made = true;
  }
  const auto in_time = std::make_shared<bool>(false);
  const bool begun = lanes_.run_apart(
      pair->lane->device(), [this, self = kept(), pair, in_time] { *in_time = make(pair); },
      [this, self = kept(), pair, in_time, deadline] {
        if (!*in_time) {
          pair->lane->post([this, self, pair] { retired(pair); });
          return;
        }
        lanes_.connector().post([this, self, pair, deadline] {
          if (broken(*pair)) return;
          if (pair->made != nccl::kSuccess && pair->made != nccl::kInProgress)
            return break_pair(pair, error_of(*pair, pair->made, "cannot be opened"), true);
          poll_opening(pair, deadline);
        });
      });
  if (!begun) {
    {
      const base::MutexLock lock(mutex_);
      pair->being_made = false;
    }
    const Error why(ErrorCode::overloaded, "the system gives no thread to open a communicator");
    return break_pair(pair, why, true);
  }
  lanes_.connector().post_at(deadline, [this, self = kept(), pair] {
    {
      const base::MutexLock lock(mutex_);
      if (!pair->being_made) return;
    }
    const Error why(ErrorCode::internal, "NCCL does not make a communicator in time");
    break_pair(pair, why, true);
  });
}

bool Communicators::make(const PairPtr& pair) {
  const NcclApi& nccl = lanes_.nccl();
  pair->made = nccl::kUnhandledCudaError;
  if (begin_own_thread(lanes_.cuda(), pair->lane->device()) == cuda::kSuccess) {
    pair->made = nccl::kSuccess;
    if (pair->end == End::source) {
      pair->made = nccl.get_unique_id(&pair->unique_id);
      if (pair->made == nccl::kSuccess && !broken(*pair)) {
        transfers_.send_frame(
            pair->peer, encode(CommOpenFrame{pair->name, lanes_.nccl_version(), pair->piece_bytes,
                                             pair->unique_id}));
      }
    }
    if (pair->made == nccl::kSuccess && !broken(*pair)) {
      nccl::Config config;
      config.blocking = 0;
      config.min_ctas = 1;
      config.max_ctas = 8;
      config.cga_cluster_size = 0;
      pair->made = nccl.comm_init_rank_config(&pair->comm, 2, pair->unique_id,
                                              pair->end == End::source ? 0 : 1, &config);
    }
  }
  {
    const base::MutexLock lock(mutex_);
    if (pair->state != NcclPair::State::broken) {
      pair->being_made = false;
      return true;
    }
  }
  if (pair->comm != nullptr) (void)nccl.comm_abort(pair->comm);
  const base::MutexLock lock(mutex_);
  pair->being_made = false;
  pair->aborted = true;
  return false;
}

void Communicators::poll_opening(const PairPtr& pair, Clock::time_point deadline) {
  if (broken(*pair)) return;
  nccl::Result state = nccl::kSuccess;
  const nccl::Result asked = lanes_.nccl().comm_get_async_error(pair->comm, &state);
  if (asked != nccl::kSuccess) state = asked;
  if (state == nccl::kSuccess) {
    {
      const base::MutexLock lock(mutex_);
      pair->initialized = true;
    }
    order_if_ready(pair);
    // Until the other end is ready, the communicator stays the connector's.
    const base::MutexLock lock(mutex_);
    if (pair->ordered) return;
  } else if (state != nccl::kInProgress) {
    return break_pair(pair, error_of(*pair, state, "cannot be opened"), true);
  }
  if (Clock::now() >= deadline) {
    return break_pair(pair, error_of(*pair, state, "is not open in time"), true);
  }
  lanes_.connector().post_at(Clock::now() + kPollInterval, [this, self = kept(), pair, deadline] {
    poll_opening(pair, deadline);
  });
}

// The connector's last step with a pair: from here on, the lane uses the communicator.
void Communicators::order_if_ready(const PairPtr& pair) {
  {
    const base::MutexLock lock(mutex_);
    if (pair->state != NcclPair::State::opening || !pair->initialized) return;
    if (pair->end == End::source && !pair->peer_ready) return;
    pair->state = NcclPair::State::testing;
    pair->ordered = true;
    ordered_.emplace(pair->token, pair);
    pair->lane->add_pair(
        pair->token, pair->end, pair->source_uid,
        [this, self = kept(), pair](std::uint64_t number) { return launch(pair, number); });
  }
  if (pair->end == End::destination) {
    transfers_.send_frame(pair->peer, encode(CommReadyFrame{pair->name}));
  } else {
    pair->lane->post([this, self = kept(), pair] { begin_test(pair); });
  }
}

void Communicators::on_comm_open(PeerId from, const CommOpenFrame& frame) {
  const auto hello = transfers_.hello_of(from);
  const auto device = static_cast<int>(frame.pair.destination_device);
  if (!hello) throw Error(ErrorCode::protocol, "COMM_OPEN frame before HELLO");
  if (frame.pair.source_device >= hello->device_uuids.size()) {
    throw Error(ErrorCode::protocol,
                "COMM_OPEN frame is of device " + std::to_string(frame.pair.source_device) +
                    ", its sender has " + std::to_string(hello->device_uuids.size()));
  }
  if (device >= lanes_.device_count()) {
    throw Error(ErrorCode::protocol, "COMM_OPEN frame names device " + std::to_string(device) +
                                         ", this process has " +
                                         std::to_string(lanes_.device_count()));
  }
  if (frame.piece_bytes < kMinPieceBytes || frame.piece_bytes > kMaxPieceBytes) {
    throw Error(ErrorCode::protocol,
                "COMM_OPEN frame has pieces of " + std::to_string(frame.piece_bytes) + " bytes");
  }
  std::string refused;
  const int version = transfers_.own_nccl();
  Lane* const lane = lanes_.find_lane(device);
  if (!nccl_versions_match(version, frame.nccl_version)) {
    refused = "NCCL versions do not match: " + std::to_string(frame.nccl_version) + " and " +
              std::to_string(version);
  } else if (!options_.nccl_between_hosts && hello->process.host != options_.identity.host) {
    refused = "NCCL encrypts nothing, and a secret is set here";
  } else if (lanes_.quarantined(device)) {
    refused = "device " + std::to_string(device) + " does not use NCCL after an abort that hung";
  } else if (lane == nullptr) {
    refused = "the system gives no thread for device " + std::to_string(device);
  }
  PairPtr pair;
  PairPtr before;
  std::vector<PairPtr> ended;  // without the lock
  {
    const base::MutexLock lock(mutex_);
    if (closed_ || lost_.contains(from)) return;
    Slot& slot =
        slots_[{from, End::destination, frame.pair.source_device, frame.pair.destination_device}];
    if (frame.pair.epoch <= slot.epoch) return;
    slot.epoch = frame.pair.epoch;
    before = slot.pair;
    const auto going_on = std::partition(slot.accepted.begin(), slot.accepted.end(),
                                         [](const PairPtr& each) { return !each->aborted; });
    ended.assign(std::make_move_iterator(going_on), std::make_move_iterator(slot.accepted.end()));
    slot.accepted.erase(going_on, slot.accepted.end());
    if (refused.empty() && slot.accepted.size() >= kMaxUnfinished)
      refused = std::to_string(kMaxUnfinished) + " communicators of this name are being aborted";
    if (refused.empty()) {
      pair = std::make_shared<NcclPair>();
      pair->name = frame.pair;
      pair->peer = from;
      pair->end = End::destination;
      pair->source_uid = hello->uid;
      pair->token = lanes_.new_pair();
      pair->lane = lane;
      pair->piece_bytes = frame.piece_bytes;
      pair->unique_id = frame.unique_id;
      slot.accepted.push_back(pair);
    }
  }
  if (before != nullptr) {
    break_pair(before, Error(ErrorCode::internal, "replaced by the peer"), false);
  }
  if (pair == nullptr) {
    return transfers_.send_frame(from, encode(CommBreakFrame{frame.pair, 0, refused}));
  }
  {
    const base::MutexLock lock(mutex_);
    if (closed_ || lost_.contains(from)) return;
    slots_[{from, End::destination, frame.pair.source_device, frame.pair.destination_device}].pair =
        pair;
  }
  lanes_.connector().post([this, self = kept(), pair] { begin_opening(pair); });
}

void Communicators::on_comm_ready(PeerId from, const CommReadyFrame& frame) {
  const base::MutexLock lock(mutex_);
  if (const PairPtr pair = find(from, End::source, frame.pair)) pair->peer_ready = true;
}

// --- testing ---

void Communicators::begin_test(const PairPtr& pair) {
  if (broken(*pair)) return;
  const auto [clock, held] = pair->lane->announce(pair->token, 0);
  if (!clock) {
    if (!held) return;
    lanes_.connector().post_at(base::deadline_after(kPollInterval), [this, self = kept(), pair] {
      pair->lane->post([this, self, pair] { begin_test(pair); });
    });
    return;
  }
  start_watching();
  RtsFrame rts;
  rts.path = Path::nccl;
  rts.pair = pair->name;
  rts.clock = *clock;
  transfers_.send_frame(pair->peer, encode(rts));
}

void Communicators::accept_test(PeerId from, const RtsFrame& rts, bool again) {
  CtsFrame cts;
  PairPtr later;
  {
    const base::MutexLock lock(mutex_);
    const PairPtr pair = find(from, End::destination, rts.pair);
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
  if (later == nullptr) return transfers_.send_frame(from, encode(cts));
  // Answered once nothing holds the device, unless the source has given up by then.
  lanes_.connector().post_at(base::deadline_after(kPollInterval),
                             [this, self = kept(), from, rts, later] {
                               try {
                                 accept_test(from, rts, true);
                               } catch (const Error& error) {  // of a clock value
                                 break_pair(later, error, true);
                               }
                             });
}

void* Communicators::test_memory(NcclPair& pair) {
  const CudaApi& cuda = lanes_.cuda();
  void* bytes = nullptr;
  cuda::Status status = cuda.malloc(&pair.test_memory, kTestBytes);
  if (status == cuda::kSuccess && pair.end == End::source) {
    status = cuda.memset_async(pair.test_memory, test_pattern(pair), kTestBytes, pair.lane->nccl());
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

void Communicators::test_arrived(const PairPtr& pair) {
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
  transfers_.send_frame(pair->peer, encode(frame));
}

void Communicators::on_test_finished(PeerId from, const FinishedFrame& frame) {
  const base::MutexLock lock(mutex_);
  const PairPtr pair = find(from, End::source, frame.pair);
  if (pair == nullptr || pair->state != NcclPair::State::testing || frame.failed != 0) return;
  pair->state = NcclPair::State::open;
}

// --- agreeing ---

Communicators::Entered Communicators::announce(PeerId to, int device, int to_device,
                                               TransferId id) {
  const base::MutexLock lock(mutex_);
  const Slot* const slot = source_slot(to, device, to_device);
  if (slot == nullptr || slot->pair == nullptr) return {};
  const PairPtr& pair = slot->pair;
  if (pair->state != NcclPair::State::open) return {};
  const auto clock = pair->lane->announce(pair->token, id).clock;
  if (!clock) return {};
  pair->used = Clock::now();
  ++pair->under_way;
  return {pair, *clock};
}

bool Communicators::withdraw(const PairPtr& pair, TransferId id) {
  const base::MutexLock lock(mutex_);
  if (!pair->lane->withdraw(pair->token, id)) return false;
  --pair->under_way;
  return true;
}

Communicators::Entered Communicators::accept(PeerId from, const RtsFrame& rts) {
  const base::MutexLock lock(mutex_);
  const PairPtr pair = find(from, End::destination, rts.pair);
  if (pair == nullptr || !pair->ordered || pair->state == NcclPair::State::broken) return {};
  const Lane::Entered entered = pair->lane->accept(pair->token, rts.id, rts.clock);
  if (!entered.clock) return {nullptr, 0, entered.held};
  return {pair, *entered.clock};
}

void Communicators::on_cts(PeerId from, const CtsFrame& frame) {
  const base::MutexLock lock(mutex_);
  const PairPtr pair = find(from, End::source, frame.pair);
  if (pair == nullptr || !pair->ordered) return;
  (void)pair->lane->agree(pair->token, frame.id, frame.clock);
}

// --- launching ---

Lane::Watch Communicators::launch(const PairPtr& pair, std::uint64_t number) {
  Lane& lane = *pair->lane;
  OutgoingPtr outgoing;
  IncomingPtr incoming;
  std::size_t bytes = kTestBytes;
  if (number != 0 && pair->end == End::source) {
    outgoing = transfers_.find_outgoing(pair->peer, number);
    if (outgoing != nullptr) bytes = outgoing->source.bytes;
  } else if (number != 0) {
    incoming = transfers_.find_incoming(pair->peer, number);
    if (incoming != nullptr) bytes = incoming->bytes;
  }
  bool is_broken = false;
  {
    const base::MutexLock lock(mutex_);
    is_broken = pair->state == NcclPair::State::broken;
    if (!is_broken) {
      std::shared_ptr<void> owner = outgoing;
      if (incoming != nullptr) owner = incoming;
      pair->launched[number] = {std::move(owner), bytes};
    }
  }
  if (is_broken) {
    lane.finish(pair->token);
    transfers_.left(pair, number);
    return nullptr;
  }
  start_watching();
  // One that could not be set up has no streams, and another device may be current here.
  if (lane.failure()) {
    break_pair(pair, *lane.failure(), true);
    return nullptr;
  }
  void* memory = nullptr;
  bool to_sink = false;
  if (number == 0) {
    memory = test_memory(*pair);
  } else if (outgoing != nullptr) {
    memory = outgoing->source.data;
  } else if (incoming != nullptr) {
    to_sink = !transfers_.allocate(incoming, lane.nccl());
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
    break_pair(pair, error_of(*pair, result, "transfer cannot be launched"), true);
    return nullptr;
  }
  // An event recorded before the background has launched would be early.
  return [this, self = kept(), pair, number] {
    if (broken(*pair)) return true;
    const nccl::Result state = async_error(*pair);
    if (state == nccl::kInProgress) return false;
    if (state == nccl::kSuccess) {
      issued(pair, number);
    } else {
      break_pair(pair, error_of(*pair, state, "transfer cannot be launched"), true);
    }
    return true;
  };
}

// kRemoteError once the communicator is being aborted.
nccl::Result Communicators::async_error(NcclPair& pair) const {
  const base::MutexLock lock(pair.comm_mutex);
  if (pair.comm_gone) return nccl::kRemoteError;
  nccl::Result state = nccl::kSuccess;
  const nccl::Result asked = lanes_.nccl().comm_get_async_error(pair.comm, &state);
  return asked != nccl::kSuccess ? asked : state;
}

nccl::Result Communicators::issue(NcclPair& pair, void* memory, std::size_t bytes, bool to_sink) {
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
                 ? nccl.send(part, piece, nccl::kInt8, 1, pair.comm, pair.lane->nccl())
                 : nccl.recv(part, piece, nccl::kInt8, 0, pair.comm, pair.lane->nccl());
    if (result != nccl::kSuccess && result != nccl::kInProgress) worst = result;
  }
  result = nccl.group_end();
  return worst != nccl::kSuccess ? worst : result;
}

void Communicators::issued(const PairPtr& pair, std::uint64_t number) {
  Lane& lane = *pair->lane;
  if (number == 0 && pair->end == End::destination) {
    const cuda::Status status = lanes_.cuda().memcpy_async(
        pair->test_bytes, pair->test_memory, kTestBytes, cuda::kDeviceToHost, lane.nccl());
    if (status != cuda::kSuccess) {
      return break_pair(pair, lane.error_of(status, "NCCL cannot be tested"), true);
    }
  }
  lane.when_done(lane.nccl(), [this, self = kept(), pair, number](cuda::Status status) {
    launch_done(pair, number, status);
  });
}

void Communicators::launch_done(const PairPtr& pair, std::uint64_t number, cuda::Status status) {
  Lane& lane = *pair->lane;
  if (broken(*pair)) return;  // retired() ends it
  if (status != cuda::kSuccess) {
    return break_pair(pair, lane.error_of(status, "NCCL transfer"), true);
  }
  const nccl::Result state = async_error(*pair);
  if (state != nccl::kSuccess && state != nccl::kInProgress) {
    return break_pair(pair, error_of(*pair, state, "transfer"), true);
  }
  NcclPair::Launched done;  // its owner ends without the lock
  {
    const base::MutexLock lock(mutex_);
    if (pair->state == NcclPair::State::broken) return;
    const auto at = pair->launched.find(number);
    done = std::move(at->second);
    pair->launched.erase(at);
    if (number != 0 && pair->end == End::source) {
      pair->used = Clock::now();
      --pair->under_way;
    }
  }
  lane.finish(pair->token);
  if (number != 0) return transfers_.launch_done(*pair, number);
  if (pair->end == End::destination) test_arrived(pair);
}

// --- what is late ---

void Communicators::start_watching() {
  {
    const base::MutexLock lock(mutex_);
    if (std::exchange(watching_, true)) return;
  }
  const auto interval = std::clamp<std::chrono::nanoseconds>(
      std::min(options_.cts_timeout, options_.stall_timeout) / 8, kMinWatchInterval,
      kMaxWatchInterval);
  lanes_.connector().post_at(base::deadline_after(interval), [this, self = kept()] { watch(); });
}

// On the connector: a lane may be blocked until a pair is broken.
void Communicators::watch() {
  std::vector<std::pair<PairPtr, std::string>> late;
  bool active = false;
  {
    const base::MutexLock lock(mutex_);
    watching_ = false;
    std::map<Lane*, std::size_t> launched;  // with the largest number of bytes
    std::set<Lane*> lanes;
    for (const auto& [token, pair] : ordered_) {
      lanes.insert(pair->lane);
      for (const auto& [number, each] : pair->launched)
        launched[pair->lane] = std::max(launched[pair->lane], each.bytes);
    }
    active = !launched.empty();
    for (const auto& [token, pair] : ordered_) {
      if (pair->launched.empty()) continue;
      const auto limit = options_.stall_timeout + stall_time(launched[pair->lane]);
      if (pair->lane->standing_still() <= limit) continue;
      late.emplace_back(pair, "nothing that device " + std::to_string(pair->lane->device()) +
                                  " runs by NCCL has ended in time");
    }
    for (Lane* const lane : lanes) {
      active = active || lane->pending() > 0;
      for (const TransferOrder::Pair token : lane->overdue(options_.cts_timeout)) {
        const auto at = ordered_.find(token);
        if (at == ordered_.end()) continue;
        late.emplace_back(at->second, "no CTS from the destination in time");
      }
    }
  }
  for (const auto& [pair, why] : late) break_pair(pair, Error(ErrorCode::timeout, why), true);
  if (active) start_watching();
}

// --- breaking ---

void Communicators::on_comm_break(PeerId from, const CommBreakFrame& frame) {
  const End end = frame.from_source != 0 ? End::destination : End::source;
  PairPtr pair;
  {
    const base::MutexLock lock(mutex_);
    pair = find(from, end, frame.pair);
    if (pair == nullptr && end == End::destination) {
      // It may be before its COMM_OPEN.
      Slot& slot = slots_[{from, end, frame.pair.source_device, frame.pair.destination_device}];
      if (slot.pair == nullptr) slot.epoch = std::max(slot.epoch, frame.pair.epoch);
    }
  }
  if (pair == nullptr) return;
  end_pair(pair, Error(ErrorCode::internal, frame.text).with_remote(true), false,
           frame.text.empty());
}

void Communicators::break_pair(const PairPtr& pair, const Error& why, bool tell) {
  end_pair(pair, why, tell, false);
}

void Communicators::on_peer_lost(PeerId peer, const Error& why) {
  std::vector<PairPtr> pairs;
  {
    const base::MutexLock lock(mutex_);
    lost_.insert(peer);
    for (const auto& [key, slot] : slots_) {
      if (std::get<0>(key) == peer && slot.pair != nullptr) pairs.push_back(slot.pair);
    }
  }
  for (const PairPtr& pair : pairs) end_pair(pair, why, false, false);
  const base::MutexLock lock(mutex_);
  std::erase_if(slots_, [peer](const auto& entry) { return std::get<0>(entry.first) == peer; });
}

void Communicators::close(const Error& why) {
  std::vector<PairPtr> pairs;
  {
    const base::MutexLock lock(mutex_);
    closed_ = true;
    for (const auto& [key, slot] : slots_) {
      if (slot.pair != nullptr) pairs.push_back(slot.pair);
    }
  }
  for (const PairPtr& pair : pairs) end_pair(pair, why, true, false);
}

void Communicators::end_pair(const PairPtr& pair, const Error& why, bool tell, bool unused) {
  bool ordered = false;
  bool failed = false;
  std::vector<std::uint64_t> left;
  {
    const base::MutexLock lock(mutex_);
    if (pair->state == NcclPair::State::broken) return;
    pair->state = NcclPair::State::broken;
    pair->why = why;
    if (!unused) ++breaks_;
    ordered = pair->ordered;
    const auto slot = slots_.find(
        {pair->peer, pair->end, pair->name.source_device, pair->name.destination_device});
    if (slot != slots_.end() && slot->second.pair == pair) {
      slot->second.pair.reset();
      if (!unused) slot->second.pause.failure(options_.reopen_backoff);
      failed = !unused && pair->end == End::source && !closed_ && !lost_.contains(pair->peer);
    }
    if (ordered) {
      left = pair->lane->drop_pair(pair->token);
      ordered_.erase(pair->token);
    }
  }
  if (failed) transfers_.report().failed(pair->peer, pair->lane->device(), Path::nccl, why.what());
  if (tell) {
    transfers_.send_frame(pair->peer,
                          encode(CommBreakFrame{pair->name, from_source(*pair), why.what()}));
  }
  for (const std::uint64_t number : left) transfers_.left(pair, number);
  if (ordered) {
    retire(pair);
  } else {
    lanes_.connector().post([this, self = kept(), pair] { retire(pair); });
  }
}

void Communicators::retire(const PairPtr& pair) {
  {
    const base::MutexLock lock(pair->comm_mutex);
    pair->comm_gone = true;
  }
  {
    const base::MutexLock lock(mutex_);
    if (!pair->being_made && pair->comm == nullptr) pair->aborted = true;  // there is none
    if (pair->aborted) return;
    lanes_.connector().post_at(base::deadline_after(options_.abort_timeout),
                               [this, self = kept(), pair] { on_abort_stuck(pair); });
    if (pair->being_made) return;  // make() aborts it
  }
  const bool begun = lanes_.abort(pair->comm, pair->lane->device(), [this, self = kept(), pair] {
    {
      const base::MutexLock lock(mutex_);
      pair->aborted = true;
    }
    pair->lane->post([this, self, pair] { retired(pair); });
  });
  if (!begun) on_abort_stuck(pair);  // the system gives no thread
}

// The kernels have been told to end; the events say when they have.
void Communicators::retired(const PairPtr& pair) {
  Lane& lane = *pair->lane;
  lane.when_done(lane.nccl(), [this, self = kept(), pair](cuda::Status) {
    std::map<std::uint64_t, NcclPair::Launched> launched;
    {
      const base::MutexLock lock(mutex_);
      launched.swap(pair->launched);
    }
    for (const auto& [number, entry] : launched) {
      pair->lane->finish(pair->token);
      transfers_.left(pair, number);
    }
    if (pair->test_memory != nullptr) (void)lanes_.cuda().free(pair->test_memory);
    if (pair->test_bytes != nullptr) (void)lanes_.cuda().free_host(pair->test_bytes);
    pair->test_memory = nullptr;
    pair->test_bytes = nullptr;
  });
}

void Communicators::on_abort_stuck(const PairPtr& pair) {
  std::map<std::uint64_t, NcclPair::Launched> launched;
  std::string text = "device " + std::to_string(pair->lane->device()) +
                     " does not use NCCL after an abort that hung";
  const Error why(ErrorCode::internal, text);
  {
    const base::MutexLock lock(mutex_);
    if (pair->aborted) return;
    launched = pair->launched;  // whose memory stays with the pair
    text += std::string("; it broke by: ") + (pair->why ? pair->why->what() : "nothing");
  }
  lanes_.quarantine(pair->lane->device());
  transfers_.report().say(pair->peer, PathReport::kQuarantine, std::move(text));
  for (const auto& [number, entry] : launched) transfers_.fail(pair, number, why);
}

}  // namespace stitch::transport::gpu
