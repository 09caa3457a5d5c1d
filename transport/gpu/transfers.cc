// One file, though long: the two ends of a transfer, step by step.
#include "stitch/transport/gpu/transfers.h"

#include <algorithm>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/base/random.h"
#include "stitch/transport/gpu/gpu_libraries.h"

namespace stitch::transport::gpu {
namespace {

std::shared_ptr<Lanes> checked(const DeviceTransfers::Options& options) {
  if (options.lanes == nullptr || !options.send_frame) {
    throw Error(ErrorCode::invalid_argument,
                "device transfers need lanes and a function that sends frames");
  }
  return options.lanes;
}

DeviceTransfers::Options without_lanes(DeviceTransfers::Options options) {
  options.lanes.reset();
  return options;
}

Error closed_error() {
  return Error(ErrorCode::shutting_down, "device transfers of this worker are closed");
}

[[noreturn]] void unexpected(const char* frame, TransferId id) {
  throw Error(ErrorCode::protocol, std::string(frame) + " frame for transfer " +
                                       std::to_string(id) + ", which does not wait for one");
}

std::string version_text(int version) { return version == 0 ? "none" : nccl_version_text(version); }

}  // namespace

// ---- DeviceTransfers

DeviceTransfers::DeviceTransfers(Options options)
    : lanes_(checked(options)), transfers_(std::make_shared<Transfers>(std::move(options))) {}

DeviceTransfers::~DeviceTransfers() { transfers_->shutdown(std::chrono::steady_clock::now()); }

TransferId DeviceTransfers::new_id() { return transfers_->new_id(); }
void DeviceTransfers::send(TransferId id, PeerId to, int to_device, DeviceSpan source,
                           cuda::Event ready, std::shared_ptr<const void> keep_alive, Done done) {
  transfers_->send(id, to, to_device, source, ready, std::move(keep_alive), std::move(done));
}
void DeviceTransfers::receive(PeerId from, TransferId id, int device, std::size_t bytes,
                              Allocate allocate, Arrived arrived, Adopt adopt) {
  transfers_->receive(from, id, device, bytes, std::move(allocate), std::move(arrived),
                      std::move(adopt));
}
void DeviceTransfers::refuse(PeerId from, TransferId id, const Error& why) {
  transfers_->refuse(from, id, why);
}
void DeviceTransfers::on_frame(PeerId from, std::span<const std::byte> frame) {
  transfers_->on_frame(from, frame);
}
void DeviceTransfers::on_peer_lost(PeerId peer, const Error& why) {
  transfers_->on_peer_lost(peer, why);
}
void DeviceTransfers::shutdown(std::chrono::steady_clock::time_point deadline) {
  transfers_->shutdown(deadline);
}
DeviceTransfers::Counters DeviceTransfers::counters() const { return transfers_->counters(); }
std::size_t DeviceTransfers::under_way() const { return transfers_->under_way(); }

// ---- Transfers

Outgoing::~Outgoing() {
  if (lane != nullptr) lane->post([owner = std::move(keep_alive)] {});
}
Incoming::~Incoming() {
  if (lane != nullptr) lane->post([owner = std::move(memory.owner)] {});
}

// What still runs on a lane keeps this alive, and may be the last to: so it does not own the lanes.
Transfers::Transfers(Options options)
    : lanes_(*options.lanes),
      options_(without_lanes(std::move(options))),
      uid_(base::random_number()),
      report_([this](PeerId peer, std::string text) {
        if (!options_.say) return;
        lanes_.connector().post([self = shared_from_this(), peer, text = std::move(text)] {
          if (!self->begin_call()) return;
          self->options_.say(peer, text);
          self->end_call();
        });
      }),
      communicators_(*this),
      staging_(*this),
      local_(*this) {}

bool Transfers::begin_call() {
  const base::MutexLock lock(mutex_);
  if (closed_) return false;
  ++calls_;
  return true;
}

void Transfers::end_call() {
  const base::MutexLock lock(mutex_);
  --calls_;
  changed_.notify_all();
}

void Transfers::send_frame(PeerId to, base::Bytes frame) {
  if (to == options_.self) {
    lanes_.connector().post([self = shared_from_this(), frame = std::move(frame)] {
      self->on_frame(self->options_.self, frame.span());
    });
    return;
  }
  {
    const base::MutexLock lock(mutex_);
    if (closed_ || peers_[to].lost) return;
    ++calls_;
  }
  options_.send_frame(to, std::move(frame));
  end_call();
}

TransferId Transfers::new_id() {
  const base::MutexLock lock(mutex_);
  return ++last_id_;
}

std::optional<HelloFrame> Transfers::hello_of(PeerId peer) const {
  if (peer == options_.self) return HelloFrame{uid_, options_.identity, own_nccl(), lanes_.uuids()};
  const base::MutexLock lock(mutex_);
  const auto at = peers_.find(peer);
  return at == peers_.end() ? std::nullopt : at->second.hello;
}

OutgoingPtr Transfers::find_outgoing(PeerId to, TransferId id) const {
  const base::MutexLock lock(mutex_);
  const auto at = outgoing_.find(id);
  return at == outgoing_.end() || at->second->to != to ? nullptr : at->second;
}

IncomingPtr Transfers::find_incoming(PeerId from, TransferId id) const {
  const base::MutexLock lock(mutex_);
  const auto at = incoming_.find({from, id});
  return at == incoming_.end() ? nullptr : at->second;
}

DeviceTransfers::Counters Transfers::counters() const {
  DeviceTransfers::Counters counters;
  report_.add_to(counters);
  communicators_.add_to(counters);
  counters.paused += lanes_.paused_peers();
  counters.nccl_version = own_nccl();
  for (int device = 0; device < lanes_.device_count(); ++device) {
    if (lanes_.quarantined(device)) counters.without_nccl.push_back(device);
    if (lanes_.held(device)) counters.held.push_back(device);
    if (lanes_.lost(device)) counters.lost.push_back(device);
  }
  const base::MutexLock lock(mutex_);
  for (const auto& [id, peer] : peers_) {
    if (peer.hello && !peer.lost) counters.peers_nccl.emplace_back(id, peer.hello->nccl_version);
  }
  counters.retries = retries_;
  counters.outgoing = outgoing_.size();
  counters.incoming = incoming_.size();
  return counters;
}

std::size_t Transfers::under_way() const {
  const base::MutexLock lock(mutex_);
  return outgoing_.size() +
         static_cast<std::size_t>(std::count_if(incoming_.begin(), incoming_.end(),
                                                [](const auto& at) { return at.second->wanted; }));
}

// --- frames ---

void Transfers::greet(PeerId peer) {
  send_frame(peer, encode(HelloFrame{uid_, options_.identity, own_nccl(), lanes_.uuids()}));
}

void Transfers::on_hello(PeerId from, HelloFrame hello) {
  bool first = false;
  {
    const base::MutexLock lock(mutex_);
    Peer& peer = peers_[from];
    if (peer.hello) throw Error(ErrorCode::protocol, "second HELLO frame of device transfers");
    peer.hello = std::move(hello);
    first = !std::exchange(peer.hello_sent, true);
  }
  if (first) greet(from);
}

void Transfers::on_frame(PeerId from, std::span<const std::byte> frame) {
  {
    const base::MutexLock lock(mutex_);
    if (closed_ || peers_[from].lost) return;
  }
  switch (kind_of(frame)) {
    case FrameKind::hello:
      return on_hello(from, decode<HelloFrame>(frame));
    case FrameKind::rts: {
      const RtsFrame rts = decode<RtsFrame>(frame);
      return rts.id == 0 ? communicators_.accept_test(from, rts) : on_rts(from, rts);
    }
    case FrameKind::cts:
      return communicators_.on_cts(from, decode<CtsFrame>(frame));
    case FrameKind::decline:
      return on_retry(from, decode<DeclineFrame>(frame).id, "DECLINE");
    case FrameKind::retry:
      return on_retry(from, decode<RetryFrame>(frame).id, "RETRY");
    case FrameKind::grant: {
      const GrantFrame grant = decode<GrantFrame>(frame);
      const OutgoingPtr transfer = find_outgoing(from, grant.id);
      if (transfer == nullptr) return;
      {
        const base::MutexLock lock(mutex_);
        if (!transfer->announced || transfer->path != Path::staging) unexpected("GRANT", grant.id);
      }
      return staging_.on_grant(transfer, grant);
    }
    case FrameKind::data: {
      const DataFrame data = decode<DataFrame>(frame);
      const IncomingPtr transfer = find_incoming(from, data.id);
      return transfer == nullptr ? void() : staging_.on_data(transfer, data);
    }
    case FrameKind::finished: {
      const FinishedFrame finished = decode<FinishedFrame>(frame);
      return finished.id == 0 ? communicators_.on_test_finished(from, finished)
                              : on_finished(from, finished);
    }
    case FrameKind::cancel:
      return on_cancel(from, decode<CancelFrame>(frame));
    case FrameKind::forget:
      return on_forget(from, decode<ForgetFrame>(frame));
    case FrameKind::comm_open:
      return communicators_.on_comm_open(from, decode<CommOpenFrame>(frame));
    case FrameKind::comm_ready:
      return communicators_.on_comm_ready(from, decode<CommReadyFrame>(frame));
    case FrameKind::comm_break:
      return communicators_.on_comm_break(from, decode<CommBreakFrame>(frame));
  }
}

// --- source ---

void Transfers::send(TransferId id, PeerId to, int to_device, DeviceSpan source, cuda::Event ready,
                     std::shared_ptr<const void> keep_alive, DeviceTransfers::Done done) {
  Lane& lane = lanes_.lane(source.device);
  if (to_device < 0 || (source.data == nullptr && source.bytes > 0)) {
    throw Error(ErrorCode::invalid_argument,
                source.data == nullptr
                    ? "the bytes to send to device " + std::to_string(to_device) + " are null"
                    : "device " + std::to_string(to_device) + " cannot be a destination");
  }
  auto transfer = std::make_shared<Outgoing>();
  transfer->id = id;
  transfer->to = to;
  transfer->to_device = to_device;
  transfer->source = source;
  transfer->ready = ready;
  transfer->keep_alive = std::move(keep_alive);
  transfer->lane = &lane;
  transfer->done = std::move(done);
  std::optional<Error> refused;
  bool first = false;
  {
    const base::MutexLock lock(mutex_);
    Peer& peer = peers_[to];
    refused = closing_ ? std::optional<Error>(closed_error()) : peer.lost;
    outgoing_.emplace(transfer->id, transfer);
    first = !refused && !std::exchange(peer.hello_sent, true);
  }
  if (first) greet(to);
  lane.post([this, self = shared_from_this(), transfer, refused = std::move(refused)] {
    if (refused) {
      end(transfer, refused);
      return;
    }
    if (transfer->ready == nullptr) return begin(transfer);
    transfer->lane->watch([this, self, transfer, failures = 0]() mutable {
      const cuda::Status status = transfer->lane->query(transfer->ready);
      if (status == cuda::kNotReady) return false;
      if (status == cuda::kSuccess) {
        begin(transfer);
        return true;
      }
      // The kernel that makes the bytes may run all the same: it is asked for again.
      if (++failures < Lane::kMaxFailures) {
        transfer->lane->find_failure();
        if (!transfer->lane->failure()) return false;
      }
      cancel(transfer, transfer->lane->error_of(status, "the bytes to send are not made"));
      return true;
    });
  });
}

PathChoice Transfers::choose(const Outgoing& transfer) {
  const std::optional<HelloFrame> hello = hello_of(transfer.to);
  const auto to_device = static_cast<std::size_t>(transfer.to_device);
  {
    const base::MutexLock lock(mutex_);
    if (transfer.retried) return {};
  }
  if (!hello || to_device >= hello->device_uuids.size()) return {};
  const int device = transfer.source.device;
  const PathEnd source{options_.identity, lanes_.uuids()[static_cast<std::size_t>(device)], device,
                       own_nccl()};
  const PathEnd destination{hello->process, hello->device_uuids[to_device], transfer.to_device,
                            hello->nccl_version};
  PathStates states;
  if (options_.use_peer && source.process == destination.process)
    states.peer = lanes_.peer_state(device, transfer.to_device);
  states.nccl = communicators_.state(transfer.to, device, transfer.to_device);
  states.nccl_between_hosts = options_.nccl_between_hosts;
  const PathChoice choice = choose_path(source, destination, states, transfer.source.bytes);
  if (choice.sealed) {
    report_.say(transfer.to, PathReport::kSealed,
                "NCCL is not used, pinned memory is: a secret is set, and NCCL between hosts "
                "encrypts nothing");
  }
  if (choice.versions_differ && options_.use_nccl) {
    const bool none_here = own_nccl() == 0 && !options_.why_no_nccl.empty();
    report_.say(transfer.to, PathReport::kVersions,
                "NCCL is not used, pinned memory is: it is " + version_text(own_nccl()) +
                    (none_here ? " (" + options_.why_no_nccl + ")" : "") + " here and " +
                    version_text(hello->nccl_version) +
                    " there, and has to be the same version at both ends");
  }
  return choice;
}

void Transfers::begin(const OutgoingPtr& transfer) {
  if (transfer->lane->failure()) return cancel(transfer, *transfer->lane->failure());
  const PathChoice choice = choose(*transfer);
  if (choice.open_nccl) communicators_.open(transfer->to, *transfer->lane, transfer->to_device);
  if (choice.test_peer) local_.test(transfer->to, transfer->source.device, transfer->to_device);
  RtsFrame rts;
  rts.id = transfer->id;
  rts.path = choice.path;
  rts.pair = {static_cast<std::uint32_t>(transfer->source.device),
              static_cast<std::uint32_t>(transfer->to_device), 0};
  rts.bytes = transfer->source.bytes;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->ended) return;
    if (rts.path == Path::nccl) {
      auto entered = communicators_.announce(transfer->to, transfer->source.device,
                                             transfer->to_device, transfer->id);
      if (entered.pair != nullptr) {
        rts.pair = entered.pair->name;
        rts.clock = entered.clock;
        transfer->pair = std::move(entered.pair);
        transfer->reading = true;
      } else {
        rts.path = Path::staging;  // it has broken in the meantime, or the device is held
      }
    } else if (rts.path == Path::local || rts.path == Path::peer) {
      rts.clock = base::random_number();
      lanes_.offer(uid_, transfer->id,
                   {transfer->source.device, transfer->source.data, transfer->source.bytes,
                    transfer->keep_alive, rts.clock});
    }
    transfer->path = rts.path;
    transfer->announced = true;
  }
  if (rts.path == Path::nccl) communicators_.start_watching();
  send_frame(transfer->to, encode(rts));
}

void Transfers::on_retry(PeerId from, TransferId id, const char* frame) {
  const OutgoingPtr transfer = find_outgoing(from, id);
  if (transfer == nullptr) return;
  PairPtr pair;
  {
    const base::MutexLock lock(mutex_);
    if (!transfer->announced || transfer->retried || transfer->path == Path::staging) {
      unexpected(frame, id);
    }
    transfer->retried = true;
    transfer->finished.reset();
    pair = std::exchange(transfer->pair, nullptr);
    ++retries_;
    // Declined: the destination has not entered it.
    if (pair != nullptr && communicators_.withdraw(pair, id)) {
      transfer->reading = false;
      pair.reset();
    }
  }
  // The destination retries what a broken pair had; its BREAK may be behind.
  if (pair != nullptr)
    communicators_.break_pair(pair, Error(ErrorCode::internal, "broken by the peer"), false);
  lanes_.withdraw(uid_, transfer->id);
  transfer->lane->post([this, self = shared_from_this(), transfer] { begin(transfer); });
}

void Transfers::on_finished(PeerId from, const FinishedFrame& frame) {
  const OutgoingPtr transfer = find_outgoing(from, frame.id);
  // It was cancelled here: its CANCEL comes to a destination that knows it no more.
  if (transfer == nullptr) return send_frame(from, encode(ForgetFrame{frame.id}));
  {
    const base::MutexLock lock(mutex_);
    if (!transfer->announced || transfer->finished) unexpected("FINISHED", frame.id);
    transfer->finished = frame;
    // Without a CTS before it: its destination has not entered it.
    if (frame.failed != 0 && transfer->pair != nullptr &&
        communicators_.withdraw(transfer->pair, frame.id)) {
      transfer->pair.reset();
      transfer->reading = false;
    }
  }
  end_if_settled(transfer);
}

void Transfers::end_if_settled(const OutgoingPtr& transfer) {
  std::optional<Error> error;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->ended || !transfer->finished || transfer->reading) return;
    if (transfer->finished->failed != 0) {
      error = Error(ErrorCode::internal, transfer->finished->text).with_remote(true);
    }
  }
  end(transfer, std::move(error));
}

bool Transfers::end(const OutgoingPtr& transfer, std::optional<Error> error) {
  DeviceTransfers::Done done;
  Path path = Path::staging;
  {
    const base::MutexLock lock(mutex_);
    if (std::exchange(transfer->ended, true)) return false;
    outgoing_.erase(transfer->id);
    path = transfer->path;
    done = std::move(transfer->done);
    ++calls_;
  }
  const int device = transfer->source.device;
  if (!error) {
    if (path == Path::nccl) communicators_.worked(transfer->to, device, transfer->to_device);
    if (path == Path::peer) lanes_.peer_worked(device, transfer->to_device);
    report_.count(transfer->to, device, path, true, transfer->source.bytes);
  }
  lanes_.withdraw(uid_, transfer->id);
  call_on(*transfer->lane, std::move(done), std::move(error));
  return true;
}

void Transfers::cancel(const OutgoingPtr& transfer, const Error& error) {
  if (!end(transfer, error)) return;
  send_frame(transfer->to, encode(CancelFrame{transfer->id, static_cast<std::uint8_t>(error.code()),
                                              error.what()}));
}

// --- destination ---

IncomingPtr Transfers::ask_for(PeerId from, TransferId id) {
  IncomingPtr& entry = incoming_[{from, id}];
  if (entry != nullptr && (entry->wanted || entry->refused)) {
    throw Error(ErrorCode::protocol,
                "transfer " + std::to_string(id) + " is received a second time");
  }
  if (entry == nullptr) {
    entry = std::make_shared<Incoming>();
    entry->from = from;
    entry->id = id;
  } else {
    --peers_[from].unasked;
  }
  return entry;
}

void Transfers::check_unasked(Peer& peer) {
  if (++peer.unasked > options_.max_transfers_per_peer) {
    throw Error(ErrorCode::protocol,
                "peer announces more than " + std::to_string(options_.max_transfers_per_peer) +
                    " transfers that no message has named or that were refused");
  }
}

void Transfers::receive(PeerId from, TransferId id, int device, std::size_t bytes,
                        DeviceTransfers::Allocate allocate, DeviceTransfers::Arrived arrived,
                        DeviceTransfers::Adopt adopt) {
  Lane& lane = lanes_.lane(device);
  IncomingPtr transfer;
  std::optional<Error> refused;
  bool announced = false;
  {
    const base::MutexLock lock(mutex_);
    Peer& peer = peers_[from];
    transfer = ask_for(from, id);
    transfer->wanted = true;
    transfer->lane = &lane;
    transfer->bytes = bytes;
    transfer->allocate = std::move(allocate);
    transfer->adopt = std::move(adopt);
    transfer->arrived = std::move(arrived);
    announced = transfer->rts.has_value();
    if (closing_) {
      refused = closed_error();
    } else {
      refused = peer.lost ? peer.lost : transfer->cancelled;
    }
  }
  if (refused) {
    lane.post([self = shared_from_this(), transfer, refused] { self->finish(transfer, refused); });
  } else if (announced) {
    start(transfer);
  }
}

void Transfers::refuse(PeerId from, TransferId id, const Error& why) {
  IncomingPtr transfer;
  {
    const base::MutexLock lock(mutex_);
    Peer& peer = peers_[from];
    if (closing_ || peer.lost) return;
    const IncomingPtr entry = ask_for(from, id);
    entry->refused = why;
    if (entry->cancelled) {
      incoming_.erase({from, id});
      return;
    }
    if (!entry->rts) return check_unasked(peer);  // answered when it is announced
    transfer = entry;
  }
  finish(transfer, why);
}

void Transfers::on_rts(PeerId from, const RtsFrame& frame) {
  IncomingPtr transfer;
  std::optional<Error> refused;
  bool named = false;
  {
    const base::MutexLock lock(mutex_);
    Peer& peer = peers_[from];
    IncomingPtr& entry = incoming_[{from, frame.id}];
    const bool unknown = entry == nullptr;
    if (unknown) {
      entry = std::make_shared<Incoming>();
      entry->from = from;
      entry->id = frame.id;
    }
    if (entry->rts || (entry->retried && frame.path != Path::staging)) unexpected("RTS", frame.id);
    entry->rts = frame;
    transfer = entry;
    refused = transfer->refused;
    if (refused) --peer.unasked;
    named = transfer->wanted;
    if (!refused && !named && unknown) check_unasked(peer);
  }
  if (refused) {
    finish(transfer, refused);
  } else if (named) {
    start(transfer);
  }
}

void Transfers::start(const IncomingPtr& transfer) {
  RtsFrame rts;
  std::optional<Error> error;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->ended || !transfer->rts || std::exchange(transfer->started, true)) return;
    rts = *transfer->rts;
    if (rts.bytes != transfer->bytes ||
        rts.pair.destination_device != static_cast<std::uint32_t>(transfer->lane->device())) {
      error.emplace(ErrorCode::protocol,
                    "transfer " + std::to_string(transfer->id) + " is announced with " +
                        std::to_string(rts.bytes) + " bytes for device " +
                        std::to_string(rts.pair.destination_device) + ", its message says " +
                        std::to_string(transfer->bytes) + " bytes for device " +
                        std::to_string(transfer->lane->device()));
    }
  }
  if (error) return finish(transfer, error);
  if (rts.path == Path::nccl) return start_nccl(transfer, rts);
  transfer->lane->post(
      [this, self = shared_from_this(), transfer, path = rts.path, key = rts.clock] {
        if (path == Path::staging) {
          staging_.start(transfer);
        } else {
          local_.start(transfer, key);
        }
      });
}

// No CUDA call here: whatever the device does, the source gets its answer.
void Transfers::start_nccl(const IncomingPtr& transfer, const RtsFrame& rts) {
  Communicators::Entered entered;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->ended) return;
    entered = communicators_.accept(transfer->from, rts);
    transfer->pair = entered.pair;
  }
  if (entered.pair == nullptr) return retry(transfer, entered.held);
  send_frame(transfer->from, encode(CtsFrame{rts.id, rts.pair, entered.clock}));
}

DeviceMemory Transfers::allocate_on(Lane& lane, DeviceTransfers::Allocate allocate,
                                    std::size_t bytes, cuda::Stream stream, std::string& reason) {
  DeviceMemory memory;
  if (lane.failure() || !begin_call()) return memory;
  (void)lanes_.cuda().get_last_error();  // of a call of ours; what it finds is its own
  try {
    memory = allocate(lane.device(), bytes, stream);
  } catch (const std::exception& exception) {  // there is no memory on the device
    reason = exception.what();
  }
  (void)lanes_.cuda().set_device(lane.device());
  allocate = nullptr;
  end_call();
  return memory;
}

bool Transfers::allocate(const IncomingPtr& transfer, cuda::Stream stream) {
  if (transfer->memory.data != nullptr) return true;  // of an earlier attempt
  DeviceTransfers::Allocate allocate;
  std::size_t bytes = 0;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->ended) return false;
    allocate = std::move(transfer->allocate);
    transfer->allocate = nullptr;
    bytes = transfer->bytes;
  }
  Lane& lane = *transfer->lane;
  std::string reason = "no memory";
  if (allocate) transfer->memory = allocate_on(lane, std::move(allocate), bytes, stream, reason);
  if (transfer->memory.data != nullptr) return true;
  lane.find_failure();
  if (lane.failure()) {
    transfer->no_memory = *lane.failure();
    return false;
  }
  transfer->no_memory.emplace(ErrorCode::overloaded,
                              "device " + std::to_string(lane.device()) + ": " +
                                  std::to_string(bytes) +
                                  " bytes to receive into cannot be allocated: " + reason);
  return false;
}

bool Transfers::adopt(const IncomingPtr& transfer, const std::shared_ptr<const void>& owner) {
  DeviceTransfers::Adopt adopt;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->ended) return false;
    adopt = std::move(transfer->adopt);
    transfer->adopt = nullptr;
  }
  if (!adopt || !begin_call()) return false;
  (void)lanes_.cuda().get_last_error();  // as in allocate_on()
  const bool taken = adopt(owner);
  adopt = nullptr;
  end_call();
  return taken;
}

void Transfers::retry(const IncomingPtr& transfer, bool held) {
  if (transfer->no_memory) return finish(transfer, transfer->no_memory);
  {
    const base::MutexLock lock(mutex_);
    if (transfer->ended) return;
    transfer->rts.reset();
    transfer->pair.reset();
    transfer->started = false;
    transfer->retried = true;
  }
  send_frame(transfer->from,
             held ? encode(DeclineFrame{transfer->id}) : encode(RetryFrame{transfer->id}));
}

void Transfers::on_cancel(PeerId from, const CancelFrame& frame) {
  const bool known = frame.code >= static_cast<std::uint8_t>(ErrorCode::invalid_argument) &&
                     frame.code <= static_cast<std::uint8_t>(ErrorCode::internal);
  const Error why =
      Error(known ? static_cast<ErrorCode>(frame.code) : ErrorCode::internal, frame.text)
          .with_remote(true);
  IncomingPtr transfer;
  PairPtr pair;
  {
    const base::MutexLock lock(mutex_);
    IncomingPtr& entry = incoming_[{from, frame.id}];
    if (entry == nullptr) {
      entry = std::make_shared<Incoming>();
      entry->from = from;
      entry->id = frame.id;
      check_unasked(peers_[from]);
    }
    if (entry->refused) {
      --peers_[from].unasked;
      incoming_.erase({from, frame.id});
      return;
    }
    if (!entry->wanted) {
      entry->cancelled = why;  // receive() will say so
      return;
    }
    transfer = entry;
    pair = transfer->pair;
  }
  if (pair != nullptr) communicators_.break_pair(pair, why, true);
  end(transfer, why, false);
}

void Transfers::on_forget(PeerId from, const ForgetFrame& frame) {
  const base::MutexLock lock(mutex_);
  const auto at = incoming_.find({from, frame.id});
  if (at == incoming_.end() || at->second->wanted || !at->second->cancelled) return;
  --peers_[from].unasked;
  incoming_.erase(at);
}

bool Transfers::end(const IncomingPtr& transfer, std::optional<Error> error, bool tell) {
  std::optional<RtsFrame> rts;
  DeviceTransfers::Arrived arrived;
  DeviceTransfers::Allocate allocate;
  DeviceTransfers::Adopt adopt;
  Lane* lane = nullptr;
  {
    const base::MutexLock lock(mutex_);
    if (std::exchange(transfer->ended, true)) return false;
    lane = transfer->lane;
    rts = transfer->rts;
    incoming_.erase({transfer->from, transfer->id});
    // After RETRY its source announces it once more: that is refused then.
    Peer& peer = peers_[transfer->from];
    if (tell && transfer->retried && !rts && !peer.lost) {
      auto later = std::make_shared<Incoming>();
      later->from = transfer->from;
      later->id = transfer->id;
      later->refused = error;
      incoming_.emplace(std::pair(transfer->from, transfer->id), std::move(later));
      ++peer.unasked;
    }
    arrived = std::move(transfer->arrived);
    allocate = std::move(transfer->allocate);
    adopt = std::move(transfer->adopt);
    if (lane != nullptr) ++calls_;
  }
  if (lane == nullptr) return rts.has_value();  // it was refused
  if (!error && rts)
    report_.count(transfer->from, lane->device(), rts->path, false, transfer->bytes);
  if (error && rts) error = error->with_prefix("by " + std::string(to_string(rts->path)));
  staging_.release(*transfer);
  std::shared_ptr<void> acknowledgment;
  if (!error) {
    acknowledgment = std::shared_ptr<void>(
        nullptr, [self = shared_from_this(), from = transfer->from, id = transfer->id](void*) {
          self->send_frame(from, encode(FinishedFrame{.id = id}));
        });
  }
  lane->post([unused = std::move(allocate), too = std::move(adopt)] {});
  call_on(
      *lane,
      [arrived = std::move(arrived),
       kept = std::move(acknowledgment)](std::optional<Error> why) mutable {
        if (arrived) arrived(std::move(why), std::move(kept));
      },
      std::move(error));
  return rts.has_value();
}

// What callbacks touch may belong to a device, so they do not run on the thread that brings frames.
void Transfers::call_on(Lane& lane, DeviceTransfers::Done done, std::optional<Error> error) {
  lane.post([this, self = shared_from_this(), done = std::move(done),
             error = std::move(error)]() mutable {
    (void)lanes_.cuda().get_last_error();  // as in allocate_on()
    if (done) done(std::move(error));
    done = nullptr;
    end_call();
  });
}

void Transfers::finish(const IncomingPtr& transfer, std::optional<Error> error) {
  FinishedFrame frame;
  frame.id = transfer->id;
  frame.failed = 1;
  if (error) frame.text = error->what();
  const bool failed = error.has_value();
  if (end(transfer, std::move(error), failed) && failed) send_frame(transfer->from, encode(frame));
}

// --- by NCCL ---

void Transfers::stop_reading(PeerId to, TransferId id) {
  const OutgoingPtr transfer = find_outgoing(to, id);
  if (transfer == nullptr) return;
  {
    const base::MutexLock lock(mutex_);
    transfer->reading = false;
  }
  end_if_settled(transfer);
}

void Transfers::launch_done(const NcclPair& pair, TransferId id) {
  if (pair.end == TransferOrder::End::source) return stop_reading(pair.peer, id);
  const IncomingPtr transfer = find_incoming(pair.peer, id);
  if (transfer != nullptr) finish(transfer, transfer->no_memory);
}

void Transfers::left(const PairPtr& pair, TransferId id) {
  if (id == 0) return;  // a test
  if (pair->end == TransferOrder::End::source) return stop_reading(pair->peer, id);
  const IncomingPtr transfer = find_incoming(pair->peer, id);
  if (transfer == nullptr) return;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->pair != pair) return;  // cancelled since, and its id used again
  }
  retry(transfer);
}

void Transfers::fail(const PairPtr& pair, TransferId id, const Error& why) {
  if (id == 0) return;
  if (pair->end == TransferOrder::End::source) {
    const OutgoingPtr transfer = find_outgoing(pair->peer, id);
    if (transfer != nullptr) cancel(transfer, why);
    return;
  }
  const IncomingPtr transfer = find_incoming(pair->peer, id);
  if (transfer == nullptr) return;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->pair != pair) return;
  }
  finish(transfer, why);
}

// --- ends ---

void Transfers::on_peer_lost(PeerId peer, const Error& why) {
  std::vector<OutgoingPtr> outgoing;
  std::vector<IncomingPtr> incoming;
  {
    const base::MutexLock lock(mutex_);
    Peer& state = peers_[peer];
    if (state.lost) return;
    state.lost = why;
    for (const auto& [id, transfer] : outgoing_) {
      if (transfer->to == peer) outgoing.push_back(transfer);
    }
    for (const auto& [key, transfer] : incoming_) {
      if (key.first == peer) incoming.push_back(transfer);
    }
  }
  communicators_.on_peer_lost(peer, why);
  report_.forget(peer);
  for (const OutgoingPtr& transfer : outgoing) end(transfer, why);
  for (const IncomingPtr& transfer : incoming) end(transfer, why, false);
}

void Transfers::shutdown(std::chrono::steady_clock::time_point deadline) {
  const Error why = closed_error();
  std::vector<OutgoingPtr> outgoing;
  std::vector<IncomingPtr> incoming;
  {
    const base::MutexLock lock(mutex_);
    if (std::exchange(closing_, true)) return;
    const auto busy = [this]() STITCH_REQUIRES(mutex_) {
      return !outgoing_.empty() || std::any_of(incoming_.begin(), incoming_.end(),
                                               [](const auto& at) { return at.second->wanted; });
    };
    while (busy() && changed_.wait_until(mutex_, deadline)) {
    }
    for (const auto& [id, transfer] : outgoing_) outgoing.push_back(transfer);
    for (const auto& [key, transfer] : incoming_) incoming.push_back(transfer);
  }
  communicators_.close(why);
  for (const OutgoingPtr& transfer : outgoing) cancel(transfer, why);
  for (const IncomingPtr& transfer : incoming) finish(transfer, why);
  const base::MutexLock lock(mutex_);
  closed_ = true;
  // Only a device that hangs keeps its lane from calling.
  const auto limit =
      std::max(deadline, base::deadline_after(std::chrono::nanoseconds(options_.abort_timeout)));
  while (calls_ > 0 && changed_.wait_until(mutex_, limit)) {
  }
}

}  // namespace stitch::transport::gpu
