#include "stitch/transport/stream/stream_connection.h"

#include <sys/epoll.h>

#include <cerrno>
#include <exception>
#include <utility>

#include "stitch/transport/stream/socket_address.h"

namespace stitch::transport {

namespace {
// Seconds. A large message that has waited this long for the receive budget is admitted although
// there is no room: those that hold the budget may never finish.
constexpr std::chrono::seconds kInsistAfter{10};
}  // namespace

StreamConnection::StreamConnection(
    const EndpointOptions& options, std::string name, std::optional<Wanted> whom,
    ConnectionEvents events, std::shared_ptr<base::TaskThread> thread,
    std::shared_ptr<Poller> poller, std::shared_ptr<ReceiveBudget> budget,
    base::UniqueFunction<void(const std::shared_ptr<StreamConnection>&)> on_end)
    : HandshakingConnection(options, whom, std::move(events), std::move(thread)),
      name_(std::move(name)),
      poller_(std::move(poller)),
      source_id_(poller_->new_id()),
      budget_(std::move(budget)),
      reader_(
          [this, allocate = options.allocator](const base::Bytes& frame, std::size_t bytes) {
            Buffer placed = place(frame, bytes);
            return placed.data != nullptr && placed.bytes == bytes ? std::move(placed)
                                                                   : allocate(Device{}, bytes);
          },
          [this, frame = options.max_frame_bytes, buffer = options.max_buffer_bytes,
           message = options.max_message_bytes] {
            return in_handshake() ? RecordReader::Limits{.frame_bytes = Handshake::kMaxBytes,
                                                         .buffers_allowed = false,
                                                         .is_size = &is_handshake_size}
                                  : RecordReader::Limits{frame, buffer, true, message, nullptr};
          },
          [this](Message message) { deliver(std::move(message)); },
          {[this](std::size_t bytes) { return admit(bytes); },
           [this] { budget_->give_back(source_id_); }}),
      on_end_(std::move(on_end)),
      sender_(*this, *poller_, source_id_) {}

void StreamConnection::begin(std::unique_ptr<Link> link) {
  bool watched = false;
  try {
    // Its first message is queued, and written once the poller watches: whatever the peer does from
    // then on is noticed.
    start();
    within_host_.store(link->within_host(), std::memory_order_relaxed);
    if (!sender_.begin(std::move(link), link_to_read_)) return;
    cheap_ = link_to_read_->cheap();
    const int fd = link_to_read_->descriptor();
    poller_->add(source_id_, fd, self());
    watched = true;
    static_cast<void>(sender_.flush());
  } catch (...) {
    const Error problem = to_error(std::current_exception());
    close(problem);
    if (!watched) end(problem);  // otherwise the thread that polls does, and may be in poll() now
  }
}

void StreamConnection::fail(const Error& error) {
  if (sender_.give_up(error)) ended(error);
}

void StreamConnection::fail_to_connect(int error) {
  no_process_listens_.store(error == ECONNREFUSED);
  fail(connect_error(socket_error(error)));
}

Error StreamConnection::connect_error(const Error& error) const {
  // What is short here says nothing about the other side.
  const bool here = !error.remote() &&
                    (error.code() == ErrorCode::overloaded || error.code() == ErrorCode::internal);
  return Error(here ? ErrorCode::overloaded : ErrorCode::disconnected,
               "connect to \"" + name_ + "\" failed: " + error.what());
}

Error StreamConnection::translate(const Error& error) const {
  if (error.code() == ErrorCode::protocol)
    return Error(error.code(), std::string(error.what()) + " from " + name_);
  if (in_handshake() && role() == Role::connecting) return connect_error(error);
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
    sender_.send({std::move(message), std::move(done)});
    return;
  }
  when_open([self = self(), queued = StreamSender::QueuedSend{std::move(message), std::move(done)}](
                const std::optional<Error>& error) mutable {
    if (!error) {
      self->sender_.send(std::move(queued));
    } else if (queued.done) {
      queued.message = {};
      queued.done(error);
    }
  });
}

void StreamConnection::transmit_handshake(base::Bytes message) {
  sender_.send({Message{std::move(message), {}}, nullptr});
}

void StreamConnection::protect(const SessionKeys& keys) {
  Link* const sealed = sender_.seal(keys, role(), reader_);
  if (sealed != nullptr) link_to_read_ = sealed;
}

Error StreamConnection::sending_failed(const std::exception_ptr& problem) {
  const Error error = translate(to_error(problem));
  close(error);
  return error;
}

bool StreamConnection::poll() {
  bool moved = false;
  try {
    if (nothing_to_do()) return false;
    moved = sender_.pending() && sender_.flush();
    if (link_to_read_ == nullptr) return moved;
    // read_again() is called after paused_ or admitted_ has changed: a thread that takes the mark
    // sees the change.
    if (look_again_.load(std::memory_order_acquire)) look_again_.exchange(false);
    const bool held = paused_.load() && !peer_gone_;
    bool came = false;
    // Within a read the link may be replaced by a sealed one, which holds what was read ahead.
    for (Link* link = nullptr; !held && link != link_to_read_;) {
      link = link_to_read_;
      came = reader_.read(*link) || came;
    }
    if (came) {
      note_heard();
      if (unwatched_ || reader_.waiting()) watch_reading();
      return true;
    }
    if (held || reader_.waiting() || unwatched_) watch_reading();
    if (held || reader_.waiting()) return moved;
    if (const auto error = link_to_read_->ended()) end(translate(*error));
  } catch (...) {
    const Error problem = translate(to_error(std::current_exception()));
    close(problem);
    end(problem);
  }
  return moved;
}

// Most rounds of polling find a connection like this.
bool StreamConnection::nothing_to_do() {
  return cheap_ && link_to_read_ != nullptr && !pending() &&
         !paused_.load(std::memory_order_relaxed) && !unwatched_.load(std::memory_order_relaxed) &&
         !reader_.waiting() && link_to_read_->quiet();
}

bool StreamConnection::ready(std::uint32_t events) {
  if (link_to_read_ == nullptr) return poll();
  link_to_read_->on_descriptor();
  // While nothing is read the descriptor would report the end again and again. So what is left is
  // read in any case: it is no more than the kernel or the ring holds.
  if (unwatched_ &&
      ((events & (EPOLLHUP | EPOLLERR | EPOLLRDHUP)) != 0 || link_to_read_->ended())) {
    peer_gone_ = true;
    if (reader_.waiting()) budget_->give_back(source_id_);
  }
  return poll();
}

bool StreamConnection::sleep() {
  if (link_to_read_ == nullptr) return true;
  if (look_again_.load()) return false;
  // What is pending must be waiting for room, of which the poller is notified.
  return (!sender_.pending() || sender_.blocked()) && link_to_read_->sleep();
}

void StreamConnection::pause_reading(bool paused) {
  if (paused_.exchange(paused) && !paused) read_again();
}

// Reading continues. Any thread.
void StreamConnection::read_again() noexcept {
  look_again_.store(true);
  poller_->poll_soon(source_id_);
}

// Has the descriptor watched, or the other side send wake-ups, only while this side reads.
void StreamConnection::watch_reading() {
  const bool unwatched =
      (paused_.load() && !peer_gone_) || (reader_.waiting() && !admitted_.load());
  if (unwatched_.load(std::memory_order_relaxed) == unwatched) return;
  unwatched_.store(unwatched, std::memory_order_relaxed);
  if (cheap_) {
    link_to_read_->suspend_reading(unwatched);
  } else {
    poller_->pause(source_id_, unwatched);
  }
  // A thread that let reading continue meanwhile may have been too early to be noticed.
  if (unwatched && !paused_.load() && (!reader_.waiting() || admitted_.load())) read_again();
}

// Whether the large message that comes next may begin.
bool StreamConnection::admit(std::size_t bytes) {
  if (admitted_.exchange(false) || peer_gone_) return true;
  if (reader_.waiting()) return false;
  const auto granted = [weak = weak_from_this()] {
    const auto self = std::static_pointer_cast<StreamConnection>(weak.lock());
    if (!self) return;
    self->admitted_.store(true);
    self->read_again();
  };
  if (budget_->take(source_id_, bytes, granted)) return true;
  if (const auto wait = budget_->wait_of(source_id_); wait != 0) insist_later(wait);
  return false;
}

// `wait` is the number of the wait: when that has ended, a later one is not admitted in its place.
void StreamConnection::insist_later(std::uint64_t wait) {
  thread().post_at(std::chrono::steady_clock::now() + kInsistAfter,
                   [weak = weak_from_this(), wait] {
                     const auto self = std::static_pointer_cast<StreamConnection>(weak.lock());
                     if (self && !self->budget_->insist(self->source_id_, wait))
                       self->insist_later(wait);
                   });
}

void StreamConnection::wake() {
  if (link_to_read_ != nullptr) link_to_read_->wake();
}

void StreamConnection::drop(const Error& why) {
  turn_away(why);
  static_cast<void>(sender_.flush());
  close(why);
}

void StreamConnection::deliver(Message message) {
  if (in_handshake()) {
    received_record_.store(true);
    if (!received_handshake(message.frame.span())) throw Error(*reason());
  } else {
    received(std::move(message));
  }
}

void StreamConnection::shut() {
  const Error closed(ErrorCode::disconnected, "connection " + name_ + " was closed");
  if (sender_.give_up(closed)) {
    ended(closed);
  } else {
    sender_.close_link();
  }
}

// The thread that polls drops the link, once: nothing is read or written any more.
void StreamConnection::end(const Error& error) noexcept {
  StreamSender::Completions completions;
  if (!sender_.end(reason().value_or(error), completions)) return;
  poller_->remove(source_id_);
  link_to_read_ = nullptr;
  budget_->give_back(source_id_);
  reader_.clear();
  sender_.complete(completions);
  ended(error);
}

void StreamConnection::finished() {
  auto on_end = std::exchange(on_end_, nullptr);
  if (on_end) on_end(self());
}

}  // namespace stitch::transport
