#include "stitch/transport/stream/stream_connection.h"

#include <sys/epoll.h>

#include <exception>
#include <utility>

#include "stitch/transport/stream/sealed_link.h"

namespace stitch::transport {

namespace {
// Of one connection, at a time: then others have their turn, and what has come is read.
constexpr std::size_t kFlushBytes = std::size_t{128} << 10;
// How often in a row a sender writes what others have sent meanwhile.
constexpr int kMostTurns = 64;
// How long a large message waits for the budget before it is let in although there is no room.
constexpr std::chrono::seconds kInsistAfter{10};

// Lets go of a mutex that is held.
class STITCH_SCOPED_CAPABILITY Unlock {
 public:
  explicit Unlock(base::Mutex& mutex) STITCH_REQUIRES(mutex) : mutex_(mutex) {}
  ~Unlock() STITCH_RELEASE() { mutex_.unlock(); }
  Unlock(const Unlock&) = delete;
  Unlock& operator=(const Unlock&) = delete;

 private:
  base::Mutex& mutex_;
};
}  // namespace

StreamConnection::StreamConnection(
    const EndpointOptions& options, std::string name, bool accepted, ConnectionEvents events,
    std::shared_ptr<base::TaskThread> thread, std::shared_ptr<Poller> poller,
    std::shared_ptr<ReceiveBudget> budget,
    base::UniqueFunction<void(const std::shared_ptr<StreamConnection>&)> gone)
    : HandshakingConnection(options, accepted ? Role::accepting : Role::connecting,
                            std::move(events), std::move(thread)),
      name_(std::move(name)),
      accepted_(accepted),
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
      gone_(std::move(gone)) {}

void StreamConnection::begin(std::unique_ptr<Link> link) {
  bool watched = false;
  try {
    // What it says first is queued, and written when the poller watches: whatever the peer does
    // from then on, somebody sees it.
    start();
    int fd = -1;
    {
      base::MutexLock lock(write_mutex_);
      if (state_ != State::waiting) return;
      state_ = State::running;
      link_ = std::move(link);
      link_to_read_ = link_.get();
      cheap_ = link_->cheap();
      fd = link_->descriptor();
    }
    poller_->add(source_id_, fd, self());
    watched = true;
    static_cast<void>(flush());
  } catch (...) {
    const Error problem = to_error(std::current_exception());
    close(problem);
    if (!watched) end(problem);  // otherwise the thread that polls does, and may be in poll() now
  }
}

bool StreamConnection::give_up(const Error& error) {
  base::MutexLock lock(write_mutex_);
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

void StreamConnection::transmit_handshake(base::Bytes message) {
  write({Message{std::move(message), {}}, nullptr});
}

// What is queued by now are the last words of the handshake, and what was read behind the peer's
// last words is sealed.
void StreamConnection::protect(const SessionKeys& keys) {
  base::MutexLock lock(write_mutex_);
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
  try {
    if (write_now(outgoing)) return;
    {
      base::MutexLock lock(intake_mutex_);
      intake_.push_back(std::move(outgoing));
      intake_filled_.store(true);
    }
    take_along();
  } catch (...) {
    // There is no memory: this message does not go, and nothing after it.
    const Error problem = translate(to_error(std::current_exception()));
    close(problem);
    outgoing.message = {};
    if (outgoing.done) outgoing.done(problem);
  }
}

// False when another thread writes.
bool StreamConnection::write_now(Outgoing& outgoing) {
  if (!write_mutex_.try_lock()) return false;
  Aftermath after;
  {
    const Unlock unlock(write_mutex_);
    try {
      write_locked(outgoing, after);
    } catch (...) {
      after.problem = std::current_exception();
    }
  }
  if (after.problem) {
    const auto problem = std::exchange(after.problem, nullptr);
    settle(after);
    std::rethrow_exception(problem);
  }
  settle(after);
  take_along();
  return true;
}

void StreamConnection::write_locked(Outgoing& outgoing, Aftermath& after) {
  const bool first = writer_.empty();
  take_in();
  if (state_ == State::ended) {
    static_cast<void>(writer_.send(std::move(outgoing), nullptr));
    abandon(after);
  } else if (state_ == State::waiting || (link_->gathers() && gather())) {
    static_cast<void>(writer_.send(std::move(outgoing), nullptr));
    pending_.store(true);
    if (state_ == State::waiting) return;
    after.poll_soon = first && !(poller_->on_this_thread() && poller_->poll_after_delivery(self()));
  } else if (auto through = writer_.send(std::move(outgoing), link_.get())) {
    after.finished.push_back(std::move(*through));
    if (sealed_ && link_->holds_output()) flush_locked(after);
  } else {
    flush_locked(after);
  }
}

void StreamConnection::settle(Aftermath& after) {
  // One that is visited in each round needs no mark when the round is this thread's.
  if (after.poll_soon && !(cheap_ && poller_->on_this_thread())) poller_->poll_soon(source_id_);
  for (Outgoing& each : after.finished) {
    each.message = {};
    if (each.done) each.done(after.error);
  }
  if (after.problem) close(translate(to_error(after.problem)));
}

// What was sent before is to go before.
void StreamConnection::take_in() {
  if (!intake_filled_.load()) return;
  std::vector<Outgoing> taken;
  {
    base::MutexLock lock(intake_mutex_);
    taken.swap(intake_);
    intake_filled_.store(false);
  }
  std::size_t next = 0;
  try {
    for (; next < taken.size(); ++next)
      static_cast<void>(writer_.send(std::move(taken[next]), nullptr));
  } catch (...) {
    // Those that are left are taken, or told, when the connection ends, which is next.
    taken.erase(taken.begin(), taken.begin() + static_cast<std::ptrdiff_t>(next));
    base::MutexLock lock(intake_mutex_);
    if (intake_.empty()) intake_.swap(taken);
    intake_filled_.store(true);
    throw;
  }
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
    {
      const Unlock unlock(write_mutex_);
      try {
        take_in();
        if (state_ == State::running && turn >= kMostTurns) {
          after.poll_soon = true;  // this thread has written for others long enough
        } else {
          flush_or_abandon(after);
        }
      } catch (...) {
        after.problem = std::current_exception();
      }
    }
    const bool failed = after.problem != nullptr;
    settle(after);
    if (failed) return;  // what is left goes when the connection has ended
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

void StreamConnection::flush_or_abandon(Aftermath& after) {
  if (state_ == State::running) flush_locked(after);
  if (state_ == State::ended) abandon(after);
}

bool StreamConnection::flush() {
  if (!write_mutex_.try_lock()) {
    // Whoever writes may only add to what waits, and the poller may not visit this source again.
    if (!cheap_) poller_->poll_soon(source_id_);
    return false;
  }
  Aftermath after;
  {
    const Unlock unlock(write_mutex_);
    try {
      take_in();
      flush_or_abandon(after);
    } catch (...) {
      after.problem = std::current_exception();
    }
  }
  settle(after);
  if (!after.problem) take_along();
  return after.moved;
}

bool StreamConnection::poll() {
  bool moved = false;
  try {
    moved = pending_.load(std::memory_order_acquire) && flush();
    if (link_to_read_ == nullptr) return moved;
    // Whoever lets reading go on clears paused_ first and sets look_again_ then: who takes the mark
    // sees that.
    if (look_again_.load(std::memory_order_acquire)) look_again_.exchange(false);
    const bool held = paused_.load() && !peer_gone_;
    bool came = false;
    // In the middle of a read the link may become a sealed one, which has what was read too much.
    for (Link* link = nullptr; !held && link != link_to_read_;) {
      link = link_to_read_;
      came = reader_.read(*link) || came;
    }
    if (came) {
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

bool StreamConnection::ready(std::uint32_t events) {
  if (link_to_read_ == nullptr) return poll();
  link_to_read_->on_descriptor();
  // The descriptor would report the end again and again while nothing is read. What is left is what
  // the carrier holds, which is not much.
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
  // What waits to be written must be waiting for room: the poller hears of that.
  return (!pending_.load() || blocked_.load()) && link_to_read_->sleep();
}

void StreamConnection::pause_reading(bool paused) {
  if (paused_.exchange(paused) && !paused) read_again();
}

// Reading goes on. Any thread.
void StreamConnection::read_again() noexcept {
  look_again_.store(true);
  poller_->poll_soon(source_id_);
}

// Has the descriptor watched, or the other side wake us, only when there is somebody to read.
void StreamConnection::watch_reading() {
  const bool unwatched =
      (paused_.load() && !peer_gone_) || (reader_.waiting() && !admitted_.load());
  if (std::exchange(unwatched_, unwatched) == unwatched) return;
  if (cheap_) {
    link_to_read_->hold(unwatched);
  } else {
    poller_->pause(source_id_, unwatched);
  }
  // Who let it go on meanwhile may have been too early to be heard.
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

// For the wait of that number: one that has ended meanwhile says nothing about a later one.
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
  static_cast<void>(flush());
  close(why);
}

void StreamConnection::deliver(Message message) {
  if (in_handshake()) {
    spoken_.store(true);
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
  base::MutexLock lock(write_mutex_);
  if (link_) link_->close();
}

// The thread that polls lets go of the link, once: nothing comes or goes any more.
void StreamConnection::end(const Error& error) {
  std::unique_ptr<Link> link;
  Aftermath after;
  const Error why = reason().value_or(error);
  {
    base::MutexLock lock(write_mutex_);
    if (state_ == State::ended) return;
    state_ = State::ended;
    why_ = why;
    link = std::move(link_);
    try {
      take_in();
      abandon(after);
    } catch (...) {
      // It ends all the same; take_along() tries again.
    }
  }
  poller_->remove(source_id_);
  link_to_read_ = nullptr;
  try {
    budget_->give_back(source_id_);
    reader_.clear();
    link.reset();
    settle(after);
    take_along();
  } catch (...) {
    // A callback has thrown: the owner hears of the end all the same.
  }
  ended(error);
}

void StreamConnection::finished() {
  auto gone = std::exchange(gone_, nullptr);
  if (gone) gone(self());
}

}  // namespace stitch::transport
