#include "stitch/transport/gpu/device_transfers.h"

#include <algorithm>
#include <string>
#include <utility>

#include "stitch/base/random.h"
#include "stitch/transport/gpu/device_transfers_impl.h"

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

}  // namespace

DeviceTransfers::DeviceTransfers(Options options)
    : lanes_(checked(options)), impl_(std::make_shared<Impl>(std::move(options))) {}

DeviceTransfers::~DeviceTransfers() { impl_->shutdown(std::chrono::steady_clock::now()); }

TransferId DeviceTransfers::new_id() { return impl_->new_id(); }
void DeviceTransfers::send_as(TransferId id, PeerId to, int to_device, DeviceSpan source,
                              cuda::Event ready, std::shared_ptr<const void> keep_alive,
                              Done done) {
  impl_->send(id, to, to_device, source, ready, std::move(keep_alive), std::move(done));
}
void DeviceTransfers::receive(PeerId from, TransferId id, int device, std::size_t bytes,
                              Allocate allocate, Arrived arrived, Adopt adopt) {
  impl_->receive(from, id, device, bytes, std::move(allocate), std::move(arrived),
                 std::move(adopt));
}
void DeviceTransfers::refuse(PeerId from, TransferId id, const Error& why) {
  impl_->refuse(from, id, why);
}
void DeviceTransfers::on_frame(PeerId from, std::span<const std::byte> frame) {
  impl_->on_frame(from, frame);
}
void DeviceTransfers::on_peer_lost(PeerId peer, const Error& why) {
  impl_->on_peer_lost(peer, why);
}
void DeviceTransfers::shutdown(std::chrono::steady_clock::time_point deadline) {
  impl_->shutdown(deadline);
}
DeviceTransfers::Counters DeviceTransfers::counters() const { return impl_->counters(); }
std::size_t DeviceTransfers::under_way() const { return impl_->under_way(); }

// What still runs on a lane keeps this alive, and may be the last to: so it does not own the lanes.
DeviceTransfers::Impl::Impl(Options options)
    : lanes_(*options.lanes),
      options_(without_lanes(std::move(options))),
      uid_(base::random_number()) {}

Outgoing::~Outgoing() {
  if (lane != nullptr) lane->post([owner = std::move(keep_alive)] {});
}
Incoming::~Incoming() {
  if (lane != nullptr) lane->post([owner = std::move(memory.owner)] {});
}

bool DeviceTransfers::Impl::begin_call() {
  const base::MutexLock lock(mutex_);
  if (closed_) return false;
  ++calls_;
  return true;
}

void DeviceTransfers::Impl::end_call() {
  const base::MutexLock lock(mutex_);
  --calls_;
  changed_.notify_all();
}

void DeviceTransfers::Impl::send_frame(PeerId to, base::Bytes frame) {
  if (to == options_.self) {
    lanes_.connector().post([self = shared_from_this(), frame = std::move(frame)] {
      self->on_frame(self->options_.self, frame.span());
    });
    return;
  }
  const CallOut call(*this);
  if (call) options_.send_frame(to, std::move(frame));
}

TransferId DeviceTransfers::Impl::new_id() {
  const base::MutexLock lock(mutex_);
  return ++last_id_;
}

void DeviceTransfers::Impl::send(TransferId id, PeerId to, int to_device, DeviceSpan source,
                                 cuda::Event ready, std::shared_ptr<const void> keep_alive,
                                 Done done) {
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
  bool greet = false;
  {
    const base::MutexLock lock(mutex_);
    Peer& peer = peers_[to];
    if (closing_) {
      refused.emplace(ErrorCode::shutting_down, "device transfers of this worker are closed");
    } else {
      refused = peer.lost;
    }
    outgoing_.emplace(transfer->id, transfer);
    greet = !refused && !std::exchange(peer.hello_sent, true);
  }
  if (greet) {
    send_frame(to, encode(HelloFrame{uid_, options_.identity, own_nccl(), lanes_.uuids()}));
  }
  start_watching();
  lane.post(on_lane(transfer, [self = shared_from_this(), transfer, refused = std::move(refused)] {
    if (refused) {
      self->end(transfer, refused);
      return;
    }
    if (transfer->ready == nullptr) return self->begin(transfer);
    transfer->lane->watch([self, transfer, failures = 0]() mutable {
      const cuda::Status status = transfer->lane->query(transfer->ready);
      if (status == cuda::kNotReady) return false;
      // The kernel that makes the bytes may run all the same: it is asked for again.
      if (status != cuda::kSuccess && ++failures < Lane::kMaxFailures) {
        transfer->lane->find_failure();
        if (!transfer->lane->failure()) return false;
      }
      self->guarded(transfer, [&] {
        if (status == cuda::kSuccess) return self->begin(transfer);
        self->cancel(transfer, transfer->lane->error_of(status, "the bytes to send are not made"));
      });
      return true;
    });
  }));
}

DeviceTransfers::Impl::IncomingPtr DeviceTransfers::Impl::ask_for(PeerId from, TransferId id) {
  auto fresh = std::make_shared<Incoming>();  // first: no entry is ever null
  IncomingPtr& entry = incoming_[{from, id}];
  if (entry != nullptr && (entry->wanted || entry->refused)) {
    throw Error(ErrorCode::protocol,
                "transfer " + std::to_string(id) + " is received a second time");
  }
  if (entry == nullptr) {
    entry = std::move(fresh);
    entry->from = from;
    entry->id = id;
  } else {
    --peers_[from].unasked;
  }
  return entry;
}

void DeviceTransfers::Impl::receive(PeerId from, TransferId id, int device, std::size_t bytes,
                                    Allocate allocate, Arrived arrived, Adopt adopt) {
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
      refused.emplace(ErrorCode::shutting_down, "device transfers of this worker are closed");
    } else {
      refused = peer.lost ? peer.lost : transfer->cancelled;
    }
  }
  start_watching();
  if (refused) {
    lane.post([self = shared_from_this(), transfer, refused] { self->finish(transfer, refused); });
  } else if (announced) {
    start(transfer);
  }
}

void DeviceTransfers::Impl::refuse(PeerId from, TransferId id, const Error& why) {
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

// --- ends ---

bool DeviceTransfers::Impl::end(const OutgoingPtr& transfer, std::optional<Error> error) {
  Done done;
  bool lives = false;
  {
    const base::MutexLock lock(mutex_);
    if (std::exchange(transfer->ended, true)) return false;
    lives = !peers_[transfer->to].lost;
    outgoing_.erase(transfer->id);
    if (!error) {
      path_worked(*transfer);
      count(transfer->to, transfer->source.device, transfer->path, true, transfer->source.bytes);
    }
    done = std::move(transfer->done);
    ++calls_;
  }
  lanes_.withdraw(uid_, transfer->id);
  call_on(*transfer->lane, std::move(done), std::move(error));
  return lives;
}

bool DeviceTransfers::Impl::end(const IncomingPtr& transfer, std::optional<Error> error,
                                std::shared_ptr<void> acknowledgment, RefuseLater refuse_later) {
  auto later = std::make_shared<Incoming>();
  bool announced = false;
  Arrived arrived;
  Allocate allocate;
  Adopt adopt;
  Lane* lane = nullptr;
  {
    const base::MutexLock lock(mutex_);
    if (std::exchange(transfer->ended, true)) return false;
    lane = transfer->lane;
    announced = transfer->rts.has_value();
    incoming_.erase({transfer->from, transfer->id});
    // Under this lock: RETRY, after which its source announces it once more, may be said meanwhile.
    const bool to_refuse = refuse_later == RefuseLater::yes ||
                           (refuse_later == RefuseLater::if_retried && transfer->retried);
    if (to_refuse && !announced && !peers_[transfer->from].lost) {
      later->from = transfer->from;
      later->id = transfer->id;
      later->refused = error;
      incoming_.emplace(std::pair(transfer->from, transfer->id), std::move(later));
      ++peers_[transfer->from].unasked;
    }
    if (!error && transfer->rts) {
      count(transfer->from, transfer->lane->device(), transfer->rts->path, false, transfer->bytes);
    }
    arrived = std::move(transfer->arrived);
    allocate = std::move(transfer->allocate);
    adopt = std::move(transfer->adopt);
    if (error && transfer->rts)
      error = error->with_prefix("by " + std::string(to_string(transfer->rts->path)));
    for (std::byte* const slot : transfer->granted) {
      transfer->lane->post([lane = transfer->lane, slot] { lane->incoming().give_back(slot); });
    }
    transfer->granted.clear();
    ++calls_;
  }
  if (lane != nullptr) {
    lane->post([unused = std::move(allocate), too = std::move(adopt)] {});
    call_on(
        *lane,
        [arrived = std::move(arrived),
         kept = std::move(acknowledgment)](std::optional<Error> why) mutable {
          if (arrived) arrived(std::move(why), std::move(kept));
        },
        std::move(error));
  } else {
    end_call();
  }
  return announced;
}

// What callbacks touch may belong to a device, so they do not run on the thread that brings frames.
void DeviceTransfers::Impl::call_on(Lane& lane, Done done, std::optional<Error> error) {
  lane.post(
      [self = shared_from_this(), done = std::move(done), error = std::move(error)]() mutable {
        (void)self->lanes_.cuda().get_last_error();  // as in allocate()
        try {
          if (done) done(std::move(error));
        } catch (...) {
          // It must not throw; what it is for is not told.
        }
        done = nullptr;
        self->end_call();
      });
}

bool DeviceTransfers::Impl::is_lost(PeerId peer) const {
  const base::MutexLock lock(mutex_);
  const auto at = peers_.find(peer);
  return at != peers_.end() && at->second.lost.has_value();
}

void DeviceTransfers::Impl::finish(const IncomingPtr& transfer, std::optional<Error> error,
                                   bool refuse_later) {
  FinishedFrame frame;
  frame.id = transfer->id;
  if (error) {
    frame.failed = 1;
    frame.text = error->what();
  }
  if (error) {
    const PeerId from = transfer->from;
    const auto later = refuse_later ? RefuseLater::yes : RefuseLater::if_retried;
    if (end(transfer, std::move(error), nullptr, later) && !is_lost(from))
      send_frame(from, encode(frame));
    return;
  }
  std::shared_ptr<void> acknowledgment;
  bool tell = false;
  {
    const base::MutexLock lock(mutex_);
    Peer& peer = peers_[transfer->from];
    tell = !transfer->ended && transfer->rts && !peer.lost;
    if (tell) ++peer.unacknowledged;
  }
  if (tell) {
    acknowledgment = std::shared_ptr<void>(
        nullptr, [self = shared_from_this(), from = transfer->from, frame](void*) {
          try {
            {
              const base::MutexLock lock(self->mutex_);
              --self->peers_[from].unacknowledged;
            }
            const CallOut call(*self);
            if (call) self->send_frame(from, encode(frame));
          } catch (...) {
            // Without memory for a frame its source waits until this worker is gone.
          }
        });
  }
  end(transfer, std::nullopt, std::move(acknowledgment));
}

void DeviceTransfers::Impl::cancel(const OutgoingPtr& transfer, const Error& error) {
  if (end(transfer, error))
    send_frame(
        transfer->to,
        encode(CancelFrame{transfer->id, static_cast<std::uint8_t>(error.code()), error.what()}));
}

void DeviceTransfers::Impl::fail(const OutgoingPtr& transfer,
                                 const std::exception_ptr& exception) noexcept {
  try {
    cancel(transfer, to_error(exception));
  } catch (...) {
    // Without memory for an error.
  }
}

void DeviceTransfers::Impl::fail(const IncomingPtr& transfer,
                                 const std::exception_ptr& exception) noexcept {
  try {
    finish(transfer, to_error(exception));
  } catch (...) {
    // As above.
  }
}

void DeviceTransfers::Impl::fail(const PairPtr& pair,
                                 const std::exception_ptr& exception) noexcept {
  try {
    break_pair(pair, to_error(exception), true);
  } catch (...) {
    // As above.
  }
}

}  // namespace stitch::transport::gpu
