#include "stitch/transport/gpu/transfers.h"

#include <algorithm>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/base/random.h"

namespace stitch::transport::gpu {
namespace {

std::shared_ptr<Lanes> checked(const DeviceTransfers::Options& options) {
  if (options.lanes == nullptr || !options.send_frame) {
    throw Error(ErrorCode::invalid_argument,
                "device transfers need lanes and a function that sends frames");
  }
  return options.lanes;
}

Error closed_error() {
  return Error(ErrorCode::shutting_down, "device transfers of this worker are closed");
}

}  // namespace

// ---- DeviceTransfers

DeviceTransfers::DeviceTransfers(Options options)
    : lanes_(checked(options)), transfers_(std::make_shared<Transfers>(std::move(options))) {}

DeviceTransfers::~DeviceTransfers() { transfers_->shutdown(std::chrono::steady_clock::now()); }

TransferId DeviceTransfers::new_id() { return transfers_->outgoing().new_id(); }
void DeviceTransfers::send(TransferId id, PeerId to, int to_device, DeviceSpan source,
                           cuda::Event ready, std::shared_ptr<const void> keep_alive, Done done) {
  transfers_->outgoing().send(id, to, to_device, source, ready, std::move(keep_alive),
                              std::move(done));
}
void DeviceTransfers::receive(PeerId from, TransferId id, int device, std::size_t bytes,
                              Allocate allocate, Arrived arrived, Adopt adopt) {
  transfers_->incoming().receive(from, id, device, bytes, std::move(allocate), std::move(arrived),
                                 std::move(adopt));
}
void DeviceTransfers::refuse(PeerId from, TransferId id, const Error& why) {
  transfers_->incoming().refuse(from, id, why);
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

// The tasks of lanes keep this object alive, and may be its last owners: so it does not own the
// lanes.
Transfers::Transfers(Options options)
    : lanes_(*options.lanes),
      options_(std::move(options)),
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
      local_copies_(*this),
      outgoing_(*this),
      incoming_(*this) {
  options_.lanes.reset();
}

DeviceTransfers::Counters Transfers::counters() const {
  DeviceTransfers::Counters counters;
  report_.add_to(counters.paths, counters.failures);
  communicators_.add_to(counters);
  outgoing_.add_to(counters);
  incoming_.add_to(counters);
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
  return counters;
}

std::size_t Transfers::under_way() const {
  const base::MutexLock lock(mutex_);
  return under_way_;
}

// --- peers ---

void Transfers::send_frame(PeerId to, base::Bytes frame) {
  if (to == options_.self) {
    lanes_.connector().post([self = shared_from_this(), frame = std::move(frame)] {
      self->on_frame(self->options_.self, frame.span());
    });
    return;
  }
  {
    const base::MutexLock lock(mutex_);
    if (state_ == State::closed || peers_[to].lost) return;
    ++calls_;
  }
  options_.send_frame(to, std::move(frame));
  end_call();
}

void Transfers::greet(PeerId peer) {
  {
    const base::MutexLock lock(mutex_);
    if (std::exchange(peers_[peer].hello_sent, true)) return;
  }
  send_frame(peer, encode(HelloFrame{uid_, options_.identity, own_nccl(), lanes_.uuids()}));
}

void Transfers::on_hello(PeerId from, HelloFrame hello) {
  {
    const base::MutexLock lock(mutex_);
    Peer& peer = peers_[from];
    if (peer.hello) throw Error(ErrorCode::protocol, "second HELLO frame of device transfers");
    peer.hello = std::move(hello);
  }
  greet(from);
}

std::optional<HelloFrame> Transfers::hello_of(PeerId peer) const {
  if (peer == options_.self) return HelloFrame{uid_, options_.identity, own_nccl(), lanes_.uuids()};
  const base::MutexLock lock(mutex_);
  const auto at = peers_.find(peer);
  return at == peers_.end() ? std::nullopt : at->second.hello;
}

bool Transfers::is_lost(PeerId peer) const {
  const base::MutexLock lock(mutex_);
  const auto at = peers_.find(peer);
  return at != peers_.end() && at->second.lost;
}

std::optional<Error> Transfers::refusal(PeerId peer) const {
  const base::MutexLock lock(mutex_);
  if (state_ != State::open) return closed_error();
  const auto at = peers_.find(peer);
  return at == peers_.end() ? std::nullopt : at->second.lost;
}

void Transfers::on_frame(PeerId from, std::span<const std::byte> frame) {
  {
    const base::MutexLock lock(mutex_);
    if (state_ == State::closed || peers_[from].lost) return;
  }
  switch (kind_of(frame)) {
    case FrameKind::hello:
      return on_hello(from, decode<HelloFrame>(frame));
    case FrameKind::rts: {
      const RtsFrame rts = decode<RtsFrame>(frame);
      return rts.id == 0 ? communicators_.accept_test(from, rts) : incoming_.on_rts(from, rts);
    }
    case FrameKind::cts:
      return communicators_.on_cts(from, decode<CtsFrame>(frame));
    case FrameKind::retry:
      return outgoing_.on_retry(from, decode<RetryFrame>(frame).id);
    case FrameKind::grant:
      return outgoing_.on_grant(from, decode<GrantFrame>(frame));
    case FrameKind::data:
      return incoming_.on_data(from, decode<DataFrame>(frame));
    case FrameKind::finished: {
      const FinishedFrame finished = decode<FinishedFrame>(frame);
      return finished.id == 0 ? communicators_.on_test_finished(from, finished)
                              : outgoing_.on_finished(from, finished);
    }
    case FrameKind::cancel:
      return incoming_.on_cancel(from, decode<CancelFrame>(frame));
    case FrameKind::forget:
      return incoming_.on_forget(from, decode<ForgetFrame>(frame));
    case FrameKind::comm_open:
      return communicators_.on_comm_open(from, decode<CommOpenFrame>(frame));
    case FrameKind::comm_ready:
      return communicators_.on_comm_ready(from, decode<CommReadyFrame>(frame));
    case FrameKind::comm_break:
      return communicators_.on_comm_break(from, decode<CommBreakFrame>(frame));
  }
}

// --- calls ---

std::optional<Error> Transfers::begin_transfer(PeerId peer) {
  {
    const base::MutexLock lock(mutex_);
    ++under_way_;
  }
  return refusal(peer);
}

void Transfers::end_transfer() {
  const base::MutexLock lock(mutex_);
  --under_way_;
  ++calls_;
}

void Transfers::call_at_end(Lane& lane, DeviceTransfers::Done done, std::optional<Error> error) {
  lane.post([this, self = shared_from_this(), done = std::move(done),
             error = std::move(error)]() mutable {
    (void)lanes_.cuda().get_last_error();  // as in allocate()
    if (done) done(std::move(error));
    done = nullptr;
    end_call();
  });
}

bool Transfers::begin_call() {
  const base::MutexLock lock(mutex_);
  if (state_ == State::closed) return false;
  ++calls_;
  return true;
}

void Transfers::end_call() {
  const base::MutexLock lock(mutex_);
  --calls_;
  changed_.notify_all();
}

DeviceMemory Transfers::allocate(Lane& lane, DeviceTransfers::Allocate allocate, std::size_t bytes,
                                 cuda::Stream stream, std::string& reason) {
  DeviceMemory memory;
  if (lane.failure() || !begin_call()) return memory;
  (void)lanes_.cuda().get_last_error();  // of a call of this lane: the callback finds its own only
  try {
    memory = allocate(lane.device(), bytes, stream);
  } catch (const std::exception& exception) {  // the device has no memory
    reason = exception.what();
  }
  (void)lanes_.cuda().set_device(lane.device());
  allocate = nullptr;
  end_call();
  return memory;
}

// --- ends ---

void Transfers::on_peer_lost(PeerId peer, const Error& why) {
  {
    const base::MutexLock lock(mutex_);
    Peer& state = peers_[peer];
    if (state.lost) return;
    state.lost = why;
  }
  communicators_.break_all(peer, why);
  report_.forget(peer);
  outgoing_.cancel_all(peer, why);
  incoming_.finish_all(peer, why);
}

void Transfers::shutdown(std::chrono::steady_clock::time_point deadline) {
  {
    const base::MutexLock lock(mutex_);
    if (state_ != State::open) return;
    state_ = State::closing;
    while (under_way_ > 0 && changed_.wait_until(mutex_, deadline)) {
    }
  }
  const Error why = closed_error();
  communicators_.break_all(std::nullopt, why);
  outgoing_.cancel_all(std::nullopt, why);
  incoming_.finish_all(std::nullopt, why);
  const base::MutexLock lock(mutex_);
  state_ = State::closed;
  // Only a device that hangs keeps its lane from calling.
  const auto limit =
      std::max(deadline, base::deadline_after(std::chrono::nanoseconds(options_.abort_timeout)));
  while (calls_ > 0 && changed_.wait_until(mutex_, limit)) {
  }
}

}  // namespace stitch::transport::gpu
