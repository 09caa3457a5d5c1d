#include "stitch/transport/handshaking_connection.h"

#include <time.h>

#include <exception>
#include <utility>
#include <vector>

namespace stitch::transport {

HandshakingConnection::HandshakingConnection(const EndpointOptions& options,
                                             std::optional<Wanted> whom, ConnectionEvents events,
                                             std::shared_ptr<base::TaskThread> thread)
    : handshake_timeout_(options.handshake_timeout),
      thread_(std::move(thread)),
      handshake_(options.self, whom, {options.secret, options.encryption},
                 [this, own_id = options.self.id,
                  refuse_own_id = options.refuse_own_id && !whom](const Hello& peer) {
                   if (refuse_own_id && peer.id == own_id) {
                     throw Error(ErrorCode::unauthenticated,
                                 describe_peer(peer) + " has the id of this worker itself");
                   }
                   if (events_.check_peer) events_.check_peer(peer);
                 }),
      events_(std::move(events)) {
  note_heard();
}

// The coarse clock costs a few nanoseconds.
void HandshakingConnection::note_heard() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  heard_.store(std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                   std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec))
                   .count(),
               std::memory_order_relaxed);
}

void HandshakingConnection::when_open(Transmit transmit) {
  if (!open_.load(std::memory_order_acquire)) {
    std::optional<Error> error;
    {
      base::MutexLock lock(mutex_);
      if (stage_ == Stage::connecting || stage_ == Stage::opening) {
        queue_.push_back(std::move(transmit));
        return;
      }
      if (stage_ != Stage::open) error = reason_;
    }
    if (error) {
      transmit(error);
      return;
    }
  }
  transmit(std::nullopt);
}

bool HandshakingConnection::closed() const {
  if (open_.load(std::memory_order_acquire)) return false;
  base::MutexLock lock(mutex_);
  return stage_ == Stage::refusing || stage_ == Stage::closed;
}

bool HandshakingConnection::half_open() const {
  if (open_.load(std::memory_order_acquire)) return false;
  base::MutexLock lock(mutex_);
  return stage_ == Stage::connecting || stage_ == Stage::refusing;
}

std::optional<Error> HandshakingConnection::reason() const {
  base::MutexLock lock(mutex_);
  return reason_;
}

void HandshakingConnection::close(const Error& reason) noexcept {
  {
    base::MutexLock lock(mutex_);
    if (stage_ == Stage::closed) return;
    stage_ = Stage::closed;
    open_.store(false, std::memory_order_release);
    if (!reason_) reason_ = reason;
  }
  report_unsent();
  shut();
}

void HandshakingConnection::on_thread(void (HandshakingConnection::*task)()) {
  thread_->post([self = shared_from_this(), task] { (*self.*task)(); });
}

void HandshakingConnection::report_unsent() {
  {
    base::MutexLock lock(mutex_);
    if (queue_.empty()) return;
  }
  on_thread(&HandshakingConnection::fail_unsent);
}

void HandshakingConnection::fail_unsent() {
  for (;;) {
    Transmit transmit;
    std::optional<Error> reason;
    {
      base::MutexLock lock(mutex_);
      if (queue_.empty()) return;
      transmit = std::move(queue_.front());
      queue_.pop_front();
      reason = reason_;
    }
    transmit(reason);
  }
}

void HandshakingConnection::start() {
  transmit_handshake(handshake_.greeting());
  // The timer is not cancelled: it does nothing if the connection is open or destroyed by then.
  thread_->post_at(std::chrono::steady_clock::now() + handshake_timeout_,
                   [weak = weak_from_this()] {
                     if (const auto self = weak.lock()) self->expire();
                   });
}

void HandshakingConnection::expire() {
  {
    base::MutexLock lock(mutex_);
    if (stage_ != Stage::connecting) return;
  }
  close(Error(ErrorCode::disconnected, "connection " + describe() +
                                           " did not finish its handshake within " +
                                           std::to_string(handshake_timeout_.count()) + " ms"));
}

bool HandshakingConnection::received_handshake(std::span<const std::byte> message) {
  if (handshake_.state() == Handshake::State::refused && ++after_refusal_ > kMaxAfterRefusal)
    return false;
  std::vector<base::Bytes> answer = handshake_.receive(message);
  for (base::Bytes& part : answer) transmit_handshake(std::move(part));
  if (handshake_.state() == Handshake::State::open) {
    if (handshake_.keys()) protect(*handshake_.keys());
    handshake_.forget_keys();
    open();
  } else if (handshake_.state() == Handshake::State::refused) {
    refuse();
  }
  return true;
}

void HandshakingConnection::open() {
  {
    base::MutexLock lock(mutex_);
    if (stage_ != Stage::connecting) return;
    stage_ = Stage::opening;
  }
  std::list<Transmit> batch;
  for (;;) {
    {
      base::MutexLock lock(mutex_);
      if (stage_ != Stage::opening) return;
      batch.swap(queue_);
      if (batch.empty()) {
        stage_ = Stage::open;
        open_.store(true, std::memory_order_release);
        break;
      }
    }
    for (Transmit& transmit : batch) transmit(std::nullopt);
    batch.clear();
  }
  if (!events_.on_open) return;
  try {
    events_.on_open(shared_from_this());
  } catch (...) {
    close(to_error(std::current_exception())
              .with_prefix("on_open of connection " + describe() + " failed"));
  }
}

void HandshakingConnection::refuse() {
  bool first = false;
  {
    base::MutexLock lock(mutex_);
    if (stage_ == Stage::closed) return;
    if (stage_ == Stage::connecting) {
      first = true;
      stage_ = Stage::refusing;
      reason_ = handshake_.error();
    }
  }
  report_unsent();
  if (handshake_.peer_refused()) {
    shut();
  } else if (first) {
    // Closing now could discard the refusal before the peer has read it; a peer that has read it
    // closes the stream.
    thread_->post_at(std::chrono::steady_clock::now() + kRefusalTimeout, [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->shut();
    });
  }
}

void HandshakingConnection::turn_away(const Error& why) {
  {
    base::MutexLock lock(mutex_);
    if (stage_ != Stage::connecting) return;
  }
  if (handshake_.state() != Handshake::State::refused) transmit_handshake(handshake_.refuse(why));
}

void HandshakingConnection::received(Message message) {
  // Messages that arrive between close() and its effect are dropped.
  if (!open_.load(std::memory_order_acquire) || !events_.on_message) return;
  try {
    events_.on_message(shared_from_this(), std::move(message));
  } catch (...) {
    close(to_error(std::current_exception())
              .with_prefix("on_message of connection " + describe() + " failed"));
  }
}

Buffer HandshakingConnection::place(const base::Bytes& frame, std::size_t bytes) {
  if (!open_.load(std::memory_order_acquire) || !events_.place) return {};
  return events_.place(shared_from_this(), frame, bytes);
}

void HandshakingConnection::ended(const Error& error) noexcept {
  {
    base::MutexLock lock(mutex_);
    stage_ = Stage::closed;
    open_.store(false, std::memory_order_release);
    if (!reason_) reason_ = error;
  }
  on_thread(&HandshakingConnection::tell_ended);
}

void HandshakingConnection::tell_ended() {
  fail_unsent();
  // The callbacks are destroyed here: they may own the owner of this connection.
  ConnectionEvents events = std::exchange(events_, {});
  if (events.on_closed) events.on_closed(shared_from_this(), *reason());
  events = {};
  finished();
}

}  // namespace stitch::transport
