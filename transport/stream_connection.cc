#include "stitch/transport/stream_connection.h"

#include <exception>
#include <utility>

namespace stitch::transport {

StreamConnection::StreamConnection(const EndpointOptions& options, std::string name, bool accepted, ConnectionEvents events,
                                   std::shared_ptr<ReaderThread> thread, std::shared_ptr<Poller> poller,
                                   UniqueFunction<void(const std::shared_ptr<StreamConnection>&)> gone)
    : HandshakingConnection(options, std::move(events), std::move(thread)),
      name_(std::move(name)),
      accepted_(accepted),
      poller_(std::move(poller)),
      source_id_(poller_->new_id()),
      reader_(
          options.allocator,
          [this, frame = options.max_frame_bytes, buffer = options.max_buffer_bytes] {
            return in_handshake() ? RecordReader::Limits{Handshake::kMaxBytes, 0, false} : RecordReader::Limits{frame, buffer, true};
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

void StreamConnection::fail(const Error& error) {
  {
    MutexLock lock(write_mutex_);
    if (state_ != State::waiting) return;
    state_ = State::ended;
  }
  ended(error);
}

Error StreamConnection::connect_error(const std::string& what) const {
  return Error(ErrorCode::disconnected, "connect to \"" + name_ + "\" failed: " + what);
}

Error StreamConnection::translate(const Error& error) const {
  if (error.code() == ErrorCode::protocol) return Error(error.code(), std::string(error.what()) + " from " + name_);
  if (in_handshake() && !accepted_) return connect_error(error.what());
  return error.with_prefix("connection " + name_ + " ended");
}

void StreamConnection::send(Message message, SendDone done) {
  for (const Buffer& buffer : message.buffers) {
    if (buffer.device == Device{}) continue;
    if (done) {
      done(Error(ErrorCode::unimplemented, "buffer on device cuda:" + std::to_string(buffer.device.index) + " cannot be sent over " +
                                               name_ + ": it moves CPU memory only"));
    }
    return;
  }
  if (is_open()) {
    write({std::move(message), std::move(done)});
    return;
  }
  when_open([self = self(), outgoing = Outgoing{std::move(message), std::move(done)}](const std::optional<Error>& error) mutable {
    if (!error) {
      self->write(std::move(outgoing));
    } else if (outgoing.done) {
      outgoing.message = {};
      outgoing.done(error);
    }
  });
}

void StreamConnection::transmit_handshake(Bytes message) { write({Message{std::move(message), {}}, nullptr}); }

void StreamConnection::write(Outgoing outgoing) {
  std::optional<Outgoing> through;
  RecordWriter::Finished finished;
  bool ended = false;
  bool poll_soon = false;
  {
    MutexLock lock(write_mutex_);
    if (state_ != State::running) {
      ended = true;
    } else if (link_->gathers() && gather()) {
      const bool first = writer_.empty();
      static_cast<void>(writer_.send(std::move(outgoing), nullptr));
      pending_.store(true);
      if (first && poller_->on_this_thread()) {
        poller_->poll_after_delivery(self());
      } else {
        poll_soon = first;
      }
    } else {
      through = writer_.send(std::move(outgoing), link_.get());
      if (!through) static_cast<void>(flush_locked(finished));
    }
  }
  if (poll_soon) poller_->poll_soon();
  if (ended) through = std::move(outgoing);
  if (through) {
    through->message = {};
    if (through->done) through->done(ended ? reason() : std::nullopt);
  }
  for (Outgoing& each : finished) {
    each.message = {};
    if (each.done) each.done(std::nullopt);
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

bool StreamConnection::flush_locked(RecordWriter::Finished& finished) {
  const bool moved = writer_.flush(*link_, finished);
  const bool pending = !writer_.empty();
  pending_.store(pending);
  if (blocked_.exchange(pending) != pending && link_->gathers()) poller_->watch_room(source_id_, pending);
  return moved;
}

bool StreamConnection::flush() {
  RecordWriter::Finished finished;
  bool moved = false;
  {
    MutexLock lock(write_mutex_);
    if (state_ != State::running || writer_.empty()) return false;
    moved = flush_locked(finished);
  }
  for (Outgoing& each : finished) {
    each.message = {};
    if (each.done) each.done(std::nullopt);
  }
  return moved;
}

bool StreamConnection::poll() {
  bool moved = pending_.load(std::memory_order_acquire) && flush();
  if (link_to_read_ == nullptr) return moved;
  try {
    if (reader_.read(*link_to_read_)) return true;
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
    received_handshake(message.frame.span());
  } else {
    received(std::move(message));
  }
}

void StreamConnection::shut() {
  bool waiting = false;
  {
    MutexLock lock(write_mutex_);
    waiting = state_ == State::waiting;
    if (waiting) {
      state_ = State::ended;
    } else if (link_) {
      link_->close();
    }
  }
  if (waiting) ended(Error(ErrorCode::disconnected, "connection " + name_ + " was closed"));
}

// The thread that polls lets go of the link, once: nothing comes or goes any more.
void StreamConnection::end(const Error& error) {
  std::unique_ptr<Link> link;
  std::vector<Outgoing> lost;
  {
    MutexLock lock(write_mutex_);
    if (state_ == State::ended) return;
    state_ = State::ended;
    link = std::move(link_);
    lost = writer_.take_all();
    pending_.store(false);
  }
  poller_->remove(source_id_);
  link_to_read_ = nullptr;
  link.reset();
  std::optional<Error> why = reason();
  if (!why) why = error;
  for (Outgoing& each : lost) {
    each.message = {};
    if (each.done) each.done(why);
  }
  ended(error);
}

void StreamConnection::finished() {
  auto gone = std::exchange(gone_, nullptr);
  if (gone) gone(self());
}

}  // namespace stitch::transport
