#include "stitch/transport/stream/stream_sender.h"

#include <utility>

#include "stitch/transport/stream/sealed_link.h"

namespace stitch::transport {

namespace {
// Bytes of one connection that are written in one go: then others have their turn, and what has
// arrived is read.
constexpr std::size_t kFlushBytes = std::size_t{128} << 10;
// Turns in a row that a sender writes what other threads have sent meanwhile; the poller continues.
constexpr int kMaxIntakeTurns = 64;
// Microseconds. A message sent so soon after the last one is gathered: less than a write to a
// socket costs.
constexpr std::chrono::microseconds kGatherWithin{10};
// Messages gathered before one is written without waiting for more.
constexpr std::size_t kMaxGathered = 64;

// Releases a mutex that is held.
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

bool StreamSender::begin(std::unique_ptr<Link> link, Link*& to_read) {
  base::MutexLock lock(write_mutex_);
  if (state_ != State::waiting) return false;
  state_ = State::running;
  link_ = std::move(link);
  cheap_ = link_->cheap();
  to_read = link_.get();
  return true;
}

bool StreamSender::give_up(const Error& why) {
  base::MutexLock lock(write_mutex_);
  if (state_ != State::waiting) return false;
  state_ = State::ended;
  why_ = why;
  return true;
}

Link* StreamSender::seal(const SessionKeys& keys, Role role, RecordReader& reader) {
  base::MutexLock lock(write_mutex_);
  if (state_ != State::running || !link_->exposed()) return nullptr;
  take_intake();
  const std::vector<std::byte> early = reader.give_up_rest();
  link_ = make_sealed_link(std::move(link_), keys, role, early, writer_.small_bytes());
  sealed_ = true;
  return link_.get();
}

void StreamSender::close_link() {
  base::MutexLock lock(write_mutex_);
  if (link_) link_->close();
}

bool StreamSender::unsent() const {
  return !writer_.empty() || (sealed_ && link_ && link_->holds_output());
}

void StreamSender::send(QueuedSend queued) {
  poller_.expect_help();
  if (write_now(queued)) return;
  {
    base::MutexLock lock(intake_mutex_);
    intake_.push_back(std::move(queued));
    intake_filled_.store(true);
  }
  write_intake();
}

// A message that cannot be sealed ends the connection: no later one is sent either.
template <class Write>
void StreamSender::locked(Completions& completions, Write&& write) {
  const Unlock unlock(write_mutex_);
  try {
    write();
  } catch (...) {
    completions.problem = std::current_exception();
  }
}

// False when another thread writes.
bool StreamSender::write_now(QueuedSend& queued) {
  if (!write_mutex_.try_lock()) return false;
  Completions completions;
  locked(completions, [&]() STITCH_REQUIRES(write_mutex_) { write_locked(queued, completions); });
  const auto problem = std::exchange(completions.problem, nullptr);
  apply(completions);
  if (problem) {
    const Error error = owner_.sending_failed(problem);
    queued.message = {};
    if (queued.done) queued.done(error);
  } else {
    write_intake();
  }
  return true;
}

void StreamSender::write_locked(QueuedSend& queued, Completions& completions) {
  const bool first = writer_.empty();
  take_intake();
  if (state_ == State::ended) {
    writer_.queue(std::move(queued));
    abandon(completions);
  } else if (state_ == State::waiting || (link_->gathers() && should_gather())) {
    writer_.queue(std::move(queued));
    pending_.store(true);
    if (state_ == State::waiting) return;
    completions.poll_soon = first && !poller_.on_this_thread();
    if (first && !completions.poll_soon) poller_.poll_after_delivery(owner_.poll_source());
  } else if (writer_.write(queued, *link_)) {
    completions.written = &queued;
    if (sealed_ && link_->holds_output()) flush_locked(completions);
  } else {
    flush_locked(completions);
  }
}

void StreamSender::apply(Completions& completions) {
  // A source that is visited in each round needs no request when this thread does the rounds.
  if (completions.poll_soon && !(cheap_ && poller_.on_this_thread())) poller_.poll_soon(source_id_);
  if (QueuedSend* const written = std::exchange(completions.written, nullptr)) {
    written->message = {};
    if (written->done) written->done(std::nullopt);
    written->done = nullptr;
  }
  for (QueuedSend& each : completions.finished) {
    each.message = {};
    if (each.done) each.done(completions.error);
  }
  if (completions.problem) static_cast<void>(owner_.sending_failed(completions.problem));
}

// Moves the intake to the writer: what was sent before is written before.
void StreamSender::take_intake() {
  if (!intake_filled_.load()) return;
  std::vector<QueuedSend> taken;
  {
    base::MutexLock lock(intake_mutex_);
    taken.swap(intake_);
    intake_filled_.store(false);
  }
  for (QueuedSend& each : taken) writer_.queue(std::move(each));
  pending_.store(unsent());
}

// Of a connection that has ended.
void StreamSender::abandon(Completions& completions) {
  completions.error = why_;
  for (QueuedSend& each : writer_.take_all()) completions.finished.push_back(std::move(each));
  pending_.store(false);
}

// A thread that finds write_mutex_ taken fills the intake first and tries again afterwards; a
// thread that releases write_mutex_ looks at the intake afterwards. One of them sees what the other
// did.
void StreamSender::write_intake() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int turn = 0; intake_filled_.load() && write_mutex_.try_lock(); ++turn) {
    Completions completions;
    locked(completions, [&]() STITCH_REQUIRES(write_mutex_) {
      take_intake();
      if (state_ == State::running && turn >= kMaxIntakeTurns) {
        completions.poll_soon = true;  // this thread has written for others long enough
      } else {
        flush_or_abandon(completions);
      }
    });
    const bool failed = completions.problem != nullptr;
    apply(completions);
    if (failed) return;  // the rest is completed when the connection has ended
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
}

// Whether the message that is sent now waits to be written together with later ones.
bool StreamSender::should_gather() {
  if (poller_.on_this_thread()) return true;
  const auto now = Poller::Clock::now();
  const bool soon = now - std::exchange(last_send_, now) < kGatherWithin;
  if (soon && ++gathered_ < kMaxGathered) return true;
  gathered_ = 0;
  return false;
}

void StreamSender::flush_locked(Completions& completions) {
  std::size_t bytes = 0;
  bool full = false;
  bool moved = false;
  while (unsent() && !full && bytes < kFlushBytes) {
    if (writer_.empty()) {
      full = !link_->flush_output();
      moved = moved || !full;
      take_intake();
      continue;
    }
    const auto flushed = writer_.flush(*link_, completions.finished, 1);
    bytes += flushed.bytes;
    full = flushed.full;
    take_intake();
  }
  completions.moved = moved || bytes > 0;
  const bool pending = unsent();
  const bool blocked = pending && full;
  pending_.store(pending);
  in_bulk_.store(pending && !blocked && bytes >= kFlushBytes, std::memory_order_relaxed);
  if (blocked_.exchange(blocked) != blocked && link_->gathers())
    poller_.watch_room(source_id_, blocked);
  completions.poll_soon = pending && !blocked;
}

void StreamSender::flush_or_abandon(Completions& completions) {
  if (state_ == State::running) flush_locked(completions);
  if (state_ == State::ended) abandon(completions);
}

void StreamSender::trim() noexcept {
  if (!write_mutex_.try_lock()) return;
  {
    const Unlock unlock(write_mutex_);
    if (state_ == State::running) link_->trim();
  }
  write_intake();
}

bool StreamSender::flush() {
  if (!write_mutex_.try_lock()) {
    // The thread that writes may only queue more, and the poller may not visit this source again.
    if (!cheap_) poller_.poll_soon(source_id_);
    return false;
  }
  Completions completions;
  locked(completions, [&]() STITCH_REQUIRES(write_mutex_) {
    take_intake();
    flush_or_abandon(completions);
  });
  apply(completions);
  if (!completions.problem) write_intake();
  return completions.moved;
}

bool StreamSender::end(const Error& why, Completions& completions) {
  base::MutexLock lock(write_mutex_);
  if (state_ == State::ended) return false;
  state_ = State::ended;
  why_ = why;
  completions.link = std::move(link_);
  take_intake();
  abandon(completions);
  return true;
}

void StreamSender::complete(Completions& completions) {
  completions.link.reset();
  apply(completions);
  write_intake();
}

}  // namespace stitch::transport
