#include "stitch/transport/stream_connection.h"

#include <exception>
#include <utility>

#include "stitch/transport/sealed_link.h"

namespace stitch::transport {

namespace {
// Of one connection, at a time: then others have their turn, and what has come is read.
constexpr std::size_t kFlushBytes = std::size_t{128} << 10;
// How often in a row a sender writes what others have sent meanwhile.
constexpr int kMostTurns = 64;
}  // namespace

StreamConnection::StreamConnection(
    const EndpointOptions& options, std::string name, bool accepted, ConnectionEvents events,
    std::shared_ptr<ReaderThread> thread, std::shared_ptr<Poller> poller,
    UniqueFunction<void(const std::shared_ptr<StreamConnection>&)> gone)
    : HandshakingConnection(options, accepted ? Role::accepting : Role::connecting,
                            std::move(events), std::move(thread)),
      name_(std::move(name)),
      accepted_(accepted),
      poller_(std::move(poller)),
      source_id_(poller_->new_id()),
      reader_(
          [this, allocate = options.allocator](const Bytes& frame, std::size_t bytes) {
            Buffer placed = place(frame, bytes);
            return placed.data != nullptr && placed.bytes == bytes ? std::move(placed)
                                                                   : allocate(Device{}, bytes);
          },
          [this, frame = options.max_frame_bytes, buffer = options.max_buffer_bytes] {
            return in_handshake()
                       ? RecordReader::Limits{Handshake::kMaxBytes, 0, false, &is_handshake_size}
                       : RecordReader::Limits{frame, buffer, true, nullptr};
          },
          [this](Message message) { deliver(std::move(message)); }),
      gone_(std::move(gone)) {}

void StreamConnection::begin(std::unique_ptr<Link> link) {
  int fd = -1;
  {
    MutexLock lock(write_mutex_);
    if (state_ != State::waiting) return;
    state_ = State::running;
    link_ = std::move(link);
    link_to_read_ = link_.get();
    cheap_ = link_->cheap();
    fd = link_->descriptor();
  }
  start();
  try {
    poller_->add(source_id_, fd, self());
  } catch (const Error& error) {
    close(error);
    end(error);
  }
}

bool StreamConnection::give_up(const Error& error) {
  MutexLock lock(write_mutex_);
  if (state_ != State::waiting) return false;
  state_ = State::ended;
  why_ = error;
  return true;
}

void StreamConnection::fail(const Error& error) {
  if (give_up(error)) ended(error);
}

Error StreamConnection::connect_error(const std::string& what) const {
  return Error(ErrorCode::disconnected, "connect to \"" + name_ + "\" failed: " + what);
}

Error StreamConnection::translate(const Error& error) const {
  if (error.code() == ErrorCode::protocol)
    return Error(error.code(), std::string(error.what()) + " from " + name_);
  if (in_handshake() && !accepted_) return connect_error(error.what());
  return error.with_prefix("connection " + name_ + " ended");
}

void StreamConnection::send(Message message, SendDone done) {
  for (const Buffer& buffer : message.buffers) {
    if (buffer.device == Device{}) continue;
    if (done) {
      done(Error(ErrorCode::unimplemented,
                 "buffer on device cuda:" + std::to_string(buffer.device.index) +
                     " cannot be sent over " + name_ + ": it moves CPU memory only"));
    }
    return;
  }
  if (is_open()) {
    write({std::move(message), std::move(done)});
    return;
  }
  when_open([self = self(), outgoing = Outgoing{std::move(message), std::move(done)}](
                const std::optional<Error>& error) mutable {
    if (!error) {
      self->write(std::move(outgoing));
    } else if (outgoing.done) {
      outgoing.message = {};
      outgoing.done(error);
    }
  });
}

void StreamConnection::transmit_handshake(Bytes message) {
  write({Message{std::move(message), {}}, nullptr});
}

// What is queued by now are the last words of the handshake, and what was read behind the peer's
// last words is sealed.
void StreamConnection::protect(const SessionKeys& keys) {
  MutexLock lock(write_mutex_);
  if (state_ != State::running || !link_->exposed()) return;
  take_in();
  const std::vector<std::byte> early = reader_.give_up_rest();
  link_ = make_sealed_link(std::move(link_), keys, accepted_ ? Role::accepting : Role::connecting,
                           early, writer_.small_bytes());
  link_to_read_ = link_.get();
  sealed_ = true;
}

bool StreamConnection::unsent() const {
  return !writer_.empty() || (sealed_ && link_ && link_->holds_output());
}

void StreamConnection::write(Outgoing outgoing) {
  if (!write_mutex_.try_lock()) {
    {
      MutexLock lock(intake_mutex_);
      intake_.push_back(std::move(outgoing));
      intake_filled_.store(true);
    }
    take_along();
    return;
  }
  Aftermath after;
  const bool first = writer_.empty();
  take_in();
  if (state_ != State::running) {
    static_cast<void>(writer_.send(std::move(outgoing), nullptr));
    abandon(after);
  } else if (link_->gathers() && gather()) {
    static_cast<void>(writer_.send(std::move(outgoing), nullptr));
    pending_.store(true);
    if (first && poller_->on_this_thread()) {
      poller_->poll_after_delivery(self());
    } else {
      after.poll_soon = first;
    }
  } else if (auto through = writer_.send(std::move(outgoing), link_.get())) {
    after.finished.push_back(std::move(*through));
    if (sealed_ && link_->holds_output()) flush_locked(after);
  } else {
    flush_locked(after);
  }
  write_mutex_.unlock();
  settle(after);
  take_along();
}

void StreamConnection::settle(Aftermath& after) {
  if (after.poll_soon) poller_->poll_soon();
  for (Outgoing& each : after.finished) {
    each.message = {};
    if (each.done) each.done(after.error);
  }
}

// What was sent before is to go before.
void StreamConnection::take_in() {
  if (!intake_filled_.load()) return;
  std::vector<Outgoing> taken;
  {
    MutexLock lock(intake_mutex_);
    taken.swap(intake_);
    intake_filled_.store(false);
  }
  for (Outgoing& each : taken) static_cast<void>(writer_.send(std::move(each), nullptr));
  pending_.store(unsent());
}

// Of a connection that has ended.
void StreamConnection::abandon(Aftermath& after) {
  for (Outgoing& each : writer_.take_all()) after.finished.push_back(std::move(each));
  pending_.store(false);
  after.error = why_;
}

// Whoever finds write_mutex_ taken fills the intake first and then tries again; whoever lets go of
// write_mutex_ looks at the intake afterwards. So one of them sees what the other one did.
void StreamConnection::take_along() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int turn = 0; intake_filled_.load() && write_mutex_.try_lock(); ++turn) {
    Aftermath after;
    take_in();
    if (state_ != State::running) {
      abandon(after);
    } else if (turn < kMostTurns) {
      flush_locked(after);
    } else {
      after.poll_soon = true;  // this thread has written for others long enough
    }
    write_mutex_.unlock();
    settle(after);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
}

// Whether the next message should wait for others.
bool StreamConnection::gather() {
  constexpr std::chrono::microseconds kSoonAfter{10};
  constexpr std::size_t kMostGathered = 64;
  if (poller_->on_this_thread()) return true;
  const auto now = Poller::Clock::now();
  const bool soon = now - std::exchange(last_send_, now) < kSoonAfter;
  if (soon && ++gathered_ < kMostGathered) return true;
  gathered_ = 0;
  return false;
}

void StreamConnection::flush_locked(Aftermath& after) {
  std::size_t bytes = 0;
  bool full = false;
  bool moved = false;
  while (unsent() && !full && bytes < kFlushBytes) {
    if (writer_.empty()) {
      full = !link_->flush_output();
      moved = moved || !full;
      take_in();
      continue;
    }
    const auto flushed = writer_.flush(*link_, after.finished, 1);
    bytes += flushed.bytes;
    full = flushed.full;
    take_in();
  }
  after.moved = moved || bytes > 0;
  const bool pending = unsent();
  const bool blocked = pending && full;
  pending_.store(pending);
  if (blocked_.exchange(blocked) != blocked && link_->gathers())
    poller_->watch_room(source_id_, blocked);
  after.poll_soon = pending && !blocked;
}

bool StreamConnection::flush() {
  if (!write_mutex_.try_lock()) return false;
  Aftermath after;
  take_in();
  state_ == State::running ? flush_locked(after) : abandon(after);
  write_mutex_.unlock();
  settle(after);
  take_along();
  return after.moved;
}

bool StreamConnection::poll() {
  bool moved = pending_.load(std::memory_order_acquire) && flush();
  if (link_to_read_ == nullptr) return moved;
  try {
    // In the middle of a read the link may become a sealed one, which has what was read too much.
    bool came = false;
    for (Link* link = nullptr; link != link_to_read_;) {
      link = link_to_read_;
      came = reader_.read(*link) || came;
    }
    if (came) return true;
    if (const auto error = link_to_read_->ended()) end(translate(*error));
  } catch (...) {
    const Error problem = translate(to_error(std::current_exception()));
    close(problem);
    end(problem);
  }
  return moved;
}

bool StreamConnection::ready(std::uint32_t) {
  if (link_to_read_ != nullptr) link_to_read_->on_descriptor();
  return poll();
}

bool StreamConnection::sleep() {
  if (link_to_read_ == nullptr) return true;
  // What waits to be written must be waiting for room: the poller hears of that.
  return (!pending_.load() || blocked_.load()) && link_to_read_->sleep();
}

void StreamConnection::wake() {
  if (link_to_read_ != nullptr) link_to_read_->wake();
}

void StreamConnection::deliver(Message message) {
  if (in_handshake()) {
    if (!received_handshake(message.frame.span())) throw Error(*reason());
  } else {
    received(std::move(message));
  }
}

void StreamConnection::shut() {
  const Error closed(ErrorCode::disconnected, "connection " + name_ + " was closed");
  if (give_up(closed)) {
    ended(closed);
    return;
  }
  MutexLock lock(write_mutex_);
  if (link_) link_->close();
}

// The thread that polls lets go of the link, once: nothing comes or goes any more.
void StreamConnection::end(const Error& error) {
  std::unique_ptr<Link> link;
  Aftermath after;
  const Error why = reason().value_or(error);
  {
    MutexLock lock(write_mutex_);
    if (state_ == State::ended) return;
    state_ = State::ended;
    why_ = why;
    link = std::move(link_);
    take_in();
    abandon(after);
  }
  poller_->remove(source_id_);
  link_to_read_ = nullptr;
  link.reset();
  settle(after);
  take_along();
  ended(error);
}

void StreamConnection::finished() {
  auto gone = std::exchange(gone_, nullptr);
  if (gone) gone(self());
}

}  // namespace stitch::transport
