// One file, though long: each step of a communicator depends on those before it.
#include "stitch/transport/gpu/communicators.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/transport/gpu/transfers.h"

namespace stitch::transport::gpu {
namespace {

using State = NcclPair::State;
using CommState = NcclPair::CommState;
using Test = NcclPair::Test;

constexpr std::chrono::milliseconds kPollInterval(1);
constexpr std::chrono::milliseconds kMinWatchInterval(1);
constexpr std::chrono::milliseconds kMaxWatchInterval(100);
// Of one name and not aborted yet: a source that breaks and opens faster waits for its pause.
constexpr std::size_t kMaxUnfinished = 4;
constexpr std::size_t kMinPieceBytes = 4096;
constexpr std::size_t kMaxPieceBytes = Lane::kSinkBytes;
constexpr std::size_t kTestBytes = 4096;
constexpr std::chrono::nanoseconds kStallPerByte(10);  // 100 MB/s
// Pieces of a transfer that goes to the sink: the lane makes a call for each.
constexpr std::size_t kMaxSunkPieces = std::size_t{1} << 16;

// The number of bytes comes from a peer: up to 2^63.
std::chrono::nanoseconds stall_time(std::size_t bytes) {
  constexpr std::size_t kMax = std::chrono::nanoseconds::max().count() / 100;
  return kStallPerByte * static_cast<std::chrono::nanoseconds::rep>(std::min(bytes, kMax));
}

// The pattern differs between epochs, so that bytes of an earlier test do not pass.
int test_pattern(const NcclPair& pair) { return static_cast<int>(0x5a ^ (pair.name.epoch & 0xff)); }

std::uint8_t from_source(const NcclPair& pair) {
  return pair.end == TransferOrder::End::source ? 1 : 0;
}

}  // namespace

Error NcclPair::error_of(const NcclApi& nccl, nccl::Result result, const std::string& what) {
  const base::MutexLock lock(comm_mutex);
  const char* const last = comm_gone ? nullptr : nccl.get_last_error(comm);
  return Error(ErrorCode::internal, "NCCL between device " + std::to_string(name.source_device) +
                                        " and device " + std::to_string(name.destination_device) +
                                        ": " + what + ": " + nccl.get_error_string(result) +
                                        (last == nullptr ? "" : std::string(": ") + last));
}

nccl::Result NcclPair::async_error(const NcclApi& nccl) {
  const base::MutexLock lock(comm_mutex);
  if (comm_gone) return nccl::kRemoteError;
  nccl::Result state = nccl::kSuccess;
  const nccl::Result asked = nccl.comm_get_async_error(comm, &state);
  return asked != nccl::kSuccess ? asked : state;
}

nccl::Result NcclPair::issue(const NcclApi& nccl, void* memory, std::size_t bytes, bool to_sink) {
  const base::MutexLock lock(comm_mutex);
  if (comm_gone) return nccl::kRemoteError;
  nccl::Result result = nccl.group_start();
  if (result != nccl::kSuccess) return result;
  nccl::Result worst = nccl::kSuccess;
  for (std::size_t at = 0; at < bytes && worst == nccl::kSuccess; at += piece_bytes) {
    const std::size_t piece = std::min(piece_bytes, bytes - at);
    std::byte* const part = static_cast<std::byte*>(memory) + (to_sink ? 0 : at);
    result = end == TransferOrder::End::source
                 ? nccl.send(part, piece, nccl::kInt8, 1, comm, lane->nccl())
                 : nccl.recv(part, piece, nccl::kInt8, 0, comm, lane->nccl());
    if (result != nccl::kSuccess && result != nccl::kInProgress) worst = result;
  }
  result = nccl.group_end();
  return worst != nccl::kSuccess ? worst : result;
}

Communicators::Communicators(Transfers& transfers)
    : transfers_(transfers), lanes_(transfers.lanes()), options_(transfers.options()) {}

PairPtr Communicators::find(PeerId peer, End end, const PairName& name) const {
  const auto at = slots_.find({peer, end, name.source_device, name.destination_device});
  if (at == slots_.end() || at->second.pair == nullptr) return nullptr;
  return at->second.pair->name == name ? at->second.pair : nullptr;
}

bool Communicators::broken(const NcclPair& pair) const {
  const base::MutexLock lock(mutex_);
  return pair.state == State::broken;
}

// --- slots ---

Communicators::Slot* Communicators::source_slot(PeerId to, int device, int to_device) {
  const auto at = slots_.find(
      {to, End::source, static_cast<std::uint32_t>(device), static_cast<std::uint32_t>(to_device)});
  return at == slots_.end() ? nullptr : &at->second;
}

PathState Communicators::state(PeerId to, int device, int to_device) {
  if (transfers_.own_nccl() == 0 || lanes_.quarantined(device) || lanes_.held(device))
    return PathState::closed;
  const base::MutexLock lock(mutex_);
  const Slot* const slot = source_slot(to, device, to_device);
  if (slot == nullptr) return PathState::untried;
  if (slot->pair == nullptr) return slot->pause.over() ? PathState::untried : PathState::closed;
  return slot->pair->state == State::open ? PathState::open : PathState::opening;
}

void Communicators::worked(PeerId to, int device, int to_device) {
  const base::MutexLock lock(mutex_);
  if (Slot* const slot = source_slot(to, device, to_device)) slot->pause.success();
}

bool Communicators::has_room(const Lane& lane, PairPtr& unused) const {
  std::size_t count = 0;
  const auto before = Clock::now() - options_.unused_time;
  for (const auto& [key, slot] : slots_) {
    if (std::get<1>(key) != End::source || slot.pair == nullptr || slot.pair->lane != &lane)
      continue;
    ++count;
    const PairPtr& pair = slot.pair;
    if (pair->state != State::open || pair->under_way > 0 || pair->used > before) continue;
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
    const PairName name{static_cast<std::uint32_t>(lane.device()),
                        static_cast<std::uint32_t>(to_device), ++slot.epoch};
    pair = slot.pair =
        std::make_shared<NcclPair>(name, to, End::source, transfers_.uid(), lanes_.new_pair(),
                                   &lane, options_.nccl_piece_bytes);
  }
  if (unused != nullptr) break_pair(unused, Error(ErrorCode::cancelled, ""), true, true);
  lanes_.connector().post([this, self = transfers_.self(), pair] { begin_opening(pair); });
}

// The making initializes CUDA and allocates, so NCCL may wait for the device, and the device for a
// transfer that a time limit of the connector has to end: hence the thread of its own.
void Communicators::begin_opening(const PairPtr& pair) {
  const auto deadline = base::deadline_after(options_.open_timeout);
  {
    const base::MutexLock lock(mutex_);
    if (pair->state == State::broken) return;
    pair->comm_state = CommState::making;
  }
  const bool begun = lanes_.run_apart(
      pair->lane->device(), [this, self = transfers_.self(), pair] { make(pair); },
      [this, self = transfers_.self(), pair, deadline] {
        if (broken(*pair)) return pair->lane->post([this, self, pair] { retired(pair); });
        lanes_.connector().post([this, self, pair, deadline] {
          if (broken(*pair)) return;
          if (pair->made == nccl::kSuccess || pair->made == nccl::kInProgress)
            return poll_opening(pair, deadline);
          fail(pair, pair->made, "cannot be opened");
        });
      });
  if (!begun) {
    {
      const base::MutexLock lock(mutex_);
      pair->comm_state = CommState::none;
    }
    const Error why(ErrorCode::overloaded, "the system gives no thread to open a communicator");
    return break_pair(pair, why, true);
  }
  lanes_.connector().post_at(deadline, [this, self = transfers_.self(), pair] {
    {
      const base::MutexLock lock(mutex_);
      if (pair->comm_state != CommState::making) return;
    }
    const Error why(ErrorCode::internal, "NCCL does not make a communicator in time");
    break_pair(pair, why, true);
  });
}

void Communicators::make(const PairPtr& pair) {
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
    if (pair->state != State::broken) {
      pair->comm_state = CommState::made;
      return;
    }
  }
  if (pair->comm != nullptr) (void)nccl.comm_abort(pair->comm);
  const base::MutexLock lock(mutex_);
  pair->comm_state = CommState::aborted;
}

void Communicators::poll_opening(const PairPtr& pair, Clock::time_point deadline) {
  if (broken(*pair)) return;
  const nccl::Result state = pair->async_error(lanes_.nccl());
  if (state == nccl::kSuccess) {
    {
      const base::MutexLock lock(mutex_);
      pair->comm_state = CommState::initialized;
    }
    order_if_ready(pair);
    // The communicator stays the connector's until the other end is ready.
    const base::MutexLock lock(mutex_);
    if (pair->ordered) return;
  } else if (state != nccl::kInProgress) {
    return fail(pair, state, "cannot be opened");
  }
  if (Clock::now() >= deadline) return fail(pair, state, "is not open in time");
  lanes_.connector().post_at(
      Clock::now() + kPollInterval,
      [this, self = transfers_.self(), pair, deadline] { poll_opening(pair, deadline); });
}

// The connector's last step with a pair: from here on, the lane uses the communicator.
void Communicators::order_if_ready(const PairPtr& pair) {
  {
    const base::MutexLock lock(mutex_);
    if (pair->state != State::opening) return;
    if (pair->end == End::source && !pair->peer_ready) return;
    pair->state = State::testing;
    pair->ordered = true;
    ordered_.emplace(pair->token, pair);
    pair->lane->order().add_pair(pair->token, pair->end, pair->source_uid,
                                 [this, self = transfers_.self(), pair](std::uint64_t number) {
                                   return launch(pair, number);
                                 });
  }
  if (pair->end == End::destination) {
    transfers_.send_frame(pair->peer, encode(CommReadyFrame{pair->name}));
  } else {
    pair->lane->post([this, self = transfers_.self(), pair] { begin_test(pair); });
  }
}

void Communicators::check(const CommOpenFrame& frame, const HelloFrame& hello) const {
  const auto refuse_if = [](bool wrong, const std::string& text) {
    if (wrong) throw Error(ErrorCode::protocol, "COMM_OPEN frame " + text);
  };
  const std::size_t source = frame.pair.source_device;
  const std::size_t destination = frame.pair.destination_device;
  const std::size_t sources = hello.device_uuids.size();
  const auto destinations = static_cast<std::size_t>(lanes_.device_count());
  refuse_if(source >= sources, "is of device " + std::to_string(source) + ", its sender has " +
                                   std::to_string(sources));
  refuse_if(destination >= destinations, "names device " + std::to_string(destination) +
                                             ", this process has " + std::to_string(destinations));
  refuse_if(frame.piece_bytes < kMinPieceBytes || frame.piece_bytes > kMaxPieceBytes,
            "has pieces of " + std::to_string(frame.piece_bytes) + " bytes");
}

std::string Communicators::refusal(const CommOpenFrame& frame, const HelloFrame& hello,
                                   const Lane* lane) const {
  const std::string device = "device " + std::to_string(frame.pair.destination_device);
  const int version = transfers_.own_nccl();
  if (!nccl_versions_match(version, frame.nccl_version)) {
    return "NCCL versions do not match: " + std::to_string(frame.nccl_version) + " and " +
           std::to_string(version);
  }
  if (!options_.nccl_between_hosts && hello.process.host != options_.identity.host)
    return "NCCL encrypts nothing, and a secret is set here";
  if (lanes_.quarantined(static_cast<int>(frame.pair.destination_device)))
    return device + " does not use NCCL after an abort that hung";
  return lane == nullptr ? "the system gives no thread for " + device : "";
}

void Communicators::on_comm_open(PeerId from, const CommOpenFrame& frame) {
  const auto hello = transfers_.hello_of(from);
  if (!hello) throw Error(ErrorCode::protocol, "COMM_OPEN frame before HELLO");
  check(frame, *hello);
  Lane* const lane = lanes_.find_lane(static_cast<int>(frame.pair.destination_device));
  std::string refused = refusal(frame, *hello, lane);
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
    before = std::move(slot.pair);
    const auto going_on =
        std::partition(slot.accepted.begin(), slot.accepted.end(),
                       [](const PairPtr& each) { return each->comm_state != CommState::aborted; });
    ended.assign(std::make_move_iterator(going_on), std::make_move_iterator(slot.accepted.end()));
    slot.accepted.erase(going_on, slot.accepted.end());
    if (refused.empty() && slot.accepted.size() >= kMaxUnfinished)
      refused = std::to_string(kMaxUnfinished) + " communicators of this name are being aborted";
    if (refused.empty()) {
      pair = slot.pair = std::make_shared<NcclPair>(frame.pair, from, End::destination, hello->uid,
                                                    lanes_.new_pair(), lane, frame.piece_bytes);
      pair->unique_id = frame.unique_id;
      slot.accepted.push_back(pair);
    }
  }
  if (before != nullptr)
    break_pair(before, Error(ErrorCode::internal, "replaced by the peer"), false);
  if (pair == nullptr)
    return transfers_.send_frame(from, encode(CommBreakFrame{frame.pair, 0, refused}));
  lanes_.connector().post([this, self = transfers_.self(), pair] { begin_opening(pair); });
}

void Communicators::on_comm_ready(PeerId from, const CommReadyFrame& frame) {
  const base::MutexLock lock(mutex_);
  if (const PairPtr pair = find(from, End::source, frame.pair)) pair->peer_ready = true;
}

// --- testing ---

void Communicators::begin_test(const PairPtr& pair) {
  if (broken(*pair)) return;
  const auto [clock, held] = pair->lane->order().announce(pair->token, 0);
  if (!clock) {
    if (!held) return;
    lanes_.connector().post_at(base::deadline_after(kPollInterval),
                               [this, self = transfers_.self(), pair] {
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
    if (pair == nullptr || !pair->ordered) return;  // its source gets COMM_BREAK
    if (pair->test != (again ? Test::postponed : Test::none)) {
      throw Error(ErrorCode::protocol, "second test of a communicator from device " +
                                           std::to_string(rts.pair.source_device) + " to device " +
                                           std::to_string(rts.pair.destination_device));
    }
    const auto [clock, held] = pair->lane->order().accept(pair->token, 0, rts.clock);
    pair->test = clock ? Test::entered : held ? Test::postponed : Test::none;
    if (clock) {
      cts = {0, rts.pair, *clock};
    } else if (held) {
      later = pair;
    } else {
      return;
    }
  }
  if (later == nullptr) return transfers_.send_frame(from, encode(cts));
  // CTS comes once no LaneLock holds the device, unless the source has broken the pair by then.
  lanes_.connector().post_at(base::deadline_after(kPollInterval),
                             [this, self = transfers_.self(), from, rts, later] {
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
  pair.lane->find_failure();
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
    if (pair->state != State::testing) return;
    pair->state = State::open;
  }
  FinishedFrame frame;
  frame.pair = pair->name;
  transfers_.send_frame(pair->peer, encode(frame));
}

void Communicators::on_test_finished(PeerId from, const FinishedFrame& frame) {
  const base::MutexLock lock(mutex_);
  const PairPtr pair = find(from, End::source, frame.pair);
  if (pair == nullptr || pair->state != State::testing || frame.failed != 0) return;
  pair->state = State::open;
}

// --- agreeing ---

Communicators::Entered Communicators::announce(PeerId to, int device, int to_device,
                                               TransferId id) {
  const base::MutexLock lock(mutex_);
  const Slot* const slot = source_slot(to, device, to_device);
  if (slot == nullptr || slot->pair == nullptr) return {};
  const PairPtr& pair = slot->pair;
  if (pair->state != State::open) return {};
  const auto clock = pair->lane->order().announce(pair->token, id).clock;
  if (!clock) return {};
  pair->used = Clock::now();
  ++pair->under_way;
  return {pair, *clock};
}

bool Communicators::withdraw(const PairPtr& pair, TransferId id) {
  const base::MutexLock lock(mutex_);
  if (!pair->lane->order().withdraw(pair->token, id)) return false;
  --pair->under_way;
  return true;
}

Communicators::Entered Communicators::accept(PeerId from, const RtsFrame& rts) {
  const base::MutexLock lock(mutex_);
  const PairPtr pair = find(from, End::destination, rts.pair);
  if (pair == nullptr || !pair->ordered || pair->state == State::broken) return {};
  const auto clock = pair->lane->order().accept(pair->token, rts.id, rts.clock).clock;
  return clock ? Entered{pair, *clock} : Entered{};
}

void Communicators::on_cts(PeerId from, const CtsFrame& frame) {
  const base::MutexLock lock(mutex_);
  const PairPtr pair = find(from, End::source, frame.pair);
  if (pair == nullptr || !pair->ordered) return;
  (void)pair->lane->order().agree(pair->token, frame.id, frame.clock);
}

// --- launching ---

Lane::Watch Communicators::launch(const PairPtr& pair, std::uint64_t number) {
  Lane& lane = *pair->lane;
  OutgoingPtr outgoing;
  IncomingPtr incoming;
  std::size_t bytes = kTestBytes;
  std::shared_ptr<void> owner;
  if (number != 0 && pair->end == End::source) {
    owner = outgoing = transfers_.outgoing().find(pair->peer, number);
    if (outgoing != nullptr) bytes = outgoing->source.bytes;
  } else if (number != 0) {
    owner = incoming = transfers_.incoming().find(pair->peer, number);
    if (incoming != nullptr) bytes = incoming->bytes;
  }
  bool is_broken = false;
  {
    const base::MutexLock lock(mutex_);
    is_broken = pair->state == State::broken;
    if (!is_broken) pair->launched[number] = {std::move(owner), bytes};
  }
  if (is_broken) {
    lane.order().finish(pair->token);
    drop(pair, number, std::nullopt);
    return nullptr;
  }
  start_watching();
  // A device that could not be set up has no streams, and another device may be current here.
  if (lane.failure()) {
    break_pair(pair, *lane.failure(), true);
    return nullptr;
  }
  bool to_sink = false;
  void* memory = nullptr;
  if (number == 0) {
    memory = test_memory(*pair);
  } else if (outgoing != nullptr) {
    memory = outgoing->source.data;
  } else if (incoming != nullptr) {
    to_sink = !transfers_.incoming().allocate(incoming, lane.nccl());
    if (!to_sink) memory = incoming->memory.data;
    if (to_sink && bytes / pair->piece_bytes < kMaxSunkPieces) memory = lane.sink();
  }
  return issue(pair, number, memory, bytes, to_sink);
}

Lane::Watch Communicators::issue(const PairPtr& pair, std::uint64_t number, void* memory,
                                 std::size_t bytes, bool to_sink) {
  if (memory == nullptr) {
    const std::string text = "no memory for transfer " + std::to_string(number);
    break_pair(pair, Error(ErrorCode::overloaded, text), true);
    return nullptr;
  }
  const nccl::Result result = pair->issue(lanes_.nccl(), memory, bytes, to_sink);
  if (result != nccl::kSuccess && result != nccl::kInProgress) {
    fail(pair, result, "transfer cannot be launched");
    return nullptr;
  }
  // An event recorded before the background has launched would be early.
  return [this, self = transfers_.self(), pair, number] {
    if (broken(*pair)) return true;
    const nccl::Result state = pair->async_error(lanes_.nccl());
    if (state == nccl::kInProgress) return false;
    if (state == nccl::kSuccess) {
      issued(pair, number);
    } else {
      fail(pair, state, "transfer cannot be launched");
    }
    return true;
  };
}

void Communicators::issued(const PairPtr& pair, std::uint64_t number) {
  Lane& lane = *pair->lane;
  if (number == 0 && pair->end == End::destination) {
    const cuda::Status status = lanes_.cuda().memcpy_async(
        pair->test_bytes, pair->test_memory, kTestBytes, cuda::kDeviceToHost, lane.nccl());
    if (status != cuda::kSuccess)
      return break_pair(pair, lane.error_of(status, "NCCL cannot be tested"), true);
  }
  lane.when_done(lane.nccl(), [this, self = transfers_.self(), pair, number](cuda::Status status) {
    launch_done(pair, number, status);
  });
}

void Communicators::launch_done(const PairPtr& pair, std::uint64_t number, cuda::Status status) {
  Lane& lane = *pair->lane;
  if (broken(*pair)) return;  // retired() ends it
  if (status != cuda::kSuccess)
    return break_pair(pair, lane.error_of(status, "NCCL transfer"), true);
  const nccl::Result state = pair->async_error(lanes_.nccl());
  if (state != nccl::kSuccess && state != nccl::kInProgress) return fail(pair, state, "transfer");
  NcclPair::Launched done;  // its owner ends without the lock
  {
    const base::MutexLock lock(mutex_);
    if (pair->state == State::broken) return;
    const auto at = pair->launched.find(number);
    done = std::move(at->second);
    pair->launched.erase(at);
    if (number != 0 && pair->end == End::source) {
      pair->used = Clock::now();
      --pair->under_way;
    }
  }
  lane.order().finish(pair->token);
  if (number == 0) {
    if (pair->end == End::destination) test_arrived(pair);
  } else if (pair->end == End::source) {
    drop(pair, number, std::nullopt);
  } else if (const IncomingPtr transfer = transfers_.incoming().find(pair->peer, number)) {
    transfers_.incoming().finish(transfer, transfer->no_memory);
  }
}

// --- time limits ---

void Communicators::start_watching() {
  {
    const base::MutexLock lock(mutex_);
    if (std::exchange(watching_, true)) return;
  }
  const auto interval = std::clamp<std::chrono::nanoseconds>(
      std::min(options_.cts_timeout, options_.stall_timeout) / 8, kMinWatchInterval,
      kMaxWatchInterval);
  lanes_.connector().post_at(base::deadline_after(interval),
                             [this, self = transfers_.self()] { watch(); });
}

// On the connector: a lane may be blocked until a pair breaks.
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
      if (pair->lane->order().standing_still() <= limit) continue;
      late.emplace_back(pair, "nothing that device " + std::to_string(pair->lane->device()) +
                                  " runs by NCCL has ended in time");
    }
    for (Lane* const lane : lanes) {
      active = active || lane->order().pending() > 0;
      for (const TransferOrder::Pair token : lane->order().overdue(options_.cts_timeout)) {
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
      // COMM_BREAK has overtaken COMM_OPEN.
      Slot& slot = slots_[{from, end, frame.pair.source_device, frame.pair.destination_device}];
      if (slot.pair == nullptr) slot.epoch = std::max(slot.epoch, frame.pair.epoch);
    }
  }
  if (pair == nullptr) return;
  break_pair(pair, Error(ErrorCode::internal, frame.text).with_remote(true), false,
             frame.text.empty());
}

void Communicators::break_all(std::optional<PeerId> peer, const Error& why) {
  std::vector<PairPtr> pairs;
  {
    const base::MutexLock lock(mutex_);
    if (peer) lost_.insert(*peer);
    if (!peer) closed_ = true;
    for (const auto& [key, slot] : slots_) {
      if ((!peer || std::get<0>(key) == peer) && slot.pair != nullptr) pairs.push_back(slot.pair);
    }
  }
  for (const PairPtr& pair : pairs) break_pair(pair, why, true);
  const base::MutexLock lock(mutex_);
  std::erase_if(slots_, [peer](const auto& entry) { return std::get<0>(entry.first) == peer; });
}

void Communicators::break_pair(const PairPtr& pair, const Error& why, bool tell, bool unused) {
  bool ordered = false;
  bool failed = false;
  std::vector<std::uint64_t> left;
  {
    const base::MutexLock lock(mutex_);
    if (pair->state == State::broken) return;
    pair->state = State::broken;
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
      left = pair->lane->order().drop_pair(pair->token);
      ordered_.erase(pair->token);
    }
  }
  if (failed) transfers_.report().failed(pair->peer, pair->lane->device(), Path::nccl, why.what());
  if (tell) {
    transfers_.send_frame(pair->peer,
                          encode(CommBreakFrame{pair->name, from_source(*pair), why.what()}));
  }
  for (const std::uint64_t number : left) drop(pair, number, std::nullopt);
  if (ordered) {
    retire(pair);
  } else {
    lanes_.connector().post([this, self = transfers_.self(), pair] { retire(pair); });
  }
}

void Communicators::fail(const PairPtr& pair, nccl::Result result, const char* what) {
  break_pair(pair, pair->error_of(lanes_.nccl(), result, what), true);
}

void Communicators::drop(const PairPtr& pair, TransferId id, const std::optional<Error>& stuck) {
  if (id == 0) return;
  if (pair->end == End::destination) return transfers_.incoming().pair_broke(pair, id, stuck);
  const OutgoingPtr transfer = transfers_.outgoing().find(pair->peer, id);
  if (transfer == nullptr) return;
  if (stuck) return transfers_.outgoing().cancel(transfer, *stuck);
  transfers_.outgoing().stop_reading(transfer);
}

void Communicators::retire(const PairPtr& pair) {
  {
    const base::MutexLock lock(pair->comm_mutex);
    pair->comm_gone = true;
  }
  {
    const base::MutexLock lock(mutex_);
    const bool making = pair->comm_state == CommState::making;
    if (!making && pair->comm == nullptr) pair->comm_state = CommState::aborted;
    if (pair->comm_state == CommState::aborted) return;
    lanes_.connector().post_at(base::deadline_after(options_.abort_timeout),
                               [this, self = transfers_.self(), pair] { on_abort_stuck(pair); });
    if (making) return;  // make() aborts it
  }
  const bool begun = lanes_.run_apart(
      pair->lane->device(),
      [nccl = &lanes_.nccl(), comm = pair->comm] { (void)nccl->comm_abort(comm); },
      [this, self = transfers_.self(), pair] {
        {
          const base::MutexLock lock(mutex_);
          pair->comm_state = CommState::aborted;
        }
        pair->lane->post([this, self, pair] { retired(pair); });
      });
  if (!begun) on_abort_stuck(pair);  // the system gives no thread
}

// NCCL has told the kernels to end; the event says when they have.
void Communicators::retired(const PairPtr& pair) {
  Lane& lane = *pair->lane;
  lane.when_done(lane.nccl(), [this, self = transfers_.self(), pair](cuda::Status) {
    std::map<std::uint64_t, NcclPair::Launched> launched;
    {
      const base::MutexLock lock(mutex_);
      launched.swap(pair->launched);
    }
    for (const auto& [number, entry] : launched) {
      pair->lane->order().finish(pair->token);
      drop(pair, number, std::nullopt);
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
    if (pair->comm_state == CommState::aborted) return;
    launched = pair->launched;  // whose memory stays with the pair
    text += std::string("; it broke by: ") + (pair->why ? pair->why->what() : "nothing");
  }
  lanes_.quarantine(pair->lane->device());
  transfers_.report().say(pair->peer, PathReport::kQuarantine, std::move(text));
  for (const auto& [number, entry] : launched) drop(pair, number, why);
}

}  // namespace stitch::transport::gpu
