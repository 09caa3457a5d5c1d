// One file, though long: what a session keeps, and what its connections send of it.
#include "stitch/rpc/peers/session.h"

#include <span>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/recycler.h"
#include "stitch/rpc/message/frame_kinds.h"

namespace stitch::rpc {

// A message from send() until the peer has received it; part of Session. `message`, `number` and
// `bytes` are constant but for replace() and change_time_left().
struct Session::KeptMessage {
  static void* operator new(std::size_t bytes) { return base::take_recycled(bytes); }
  static void operator delete(void* at, std::size_t bytes) noexcept { base::recycle(at, bytes); }

  transport::Message message;
  transport::SendDone done;
  std::uint64_t call_id = 0;
  std::uint64_t number = 0;  // without kLarge
  std::size_t bytes = 0;
  std::size_t stream = 0;
  KeptMessage* next = nullptr;  // under mutex_, as `sent`
  bool sent = false;            // to some connection
  // How many hold it, and in the highest bit whether its end has been told.
  std::atomic<std::uint32_t> state{1};

  static constexpr std::uint32_t kCompleted = std::uint32_t{1} << 31;
  [[nodiscard]] bool completed() const noexcept {
    return (state.load(std::memory_order_acquire) & kCompleted) != 0;
  }
  // Whether it was completed before.
  [[nodiscard]] bool set_completed() noexcept {
    return (state.fetch_or(kCompleted, std::memory_order_acq_rel) & kCompleted) != 0;
  }
  [[nodiscard]] std::uint32_t holders() const noexcept {
    return state.load(std::memory_order_acquire) & ~kCompleted;
  }
  // One holder less; true for the last one. A sole holder stays the only one: others are added
  // under the lock, to what is in the list.
  [[nodiscard]] bool drop() noexcept {
    return holders() == 1 || (state.fetch_sub(1, std::memory_order_acq_rel) & ~kCompleted) == 1;
  }
};

namespace {

constexpr std::uint64_t kNumberMask = ~transport::FrameNumbers::kLarge;

std::size_t bytes_of(const transport::Message& message) noexcept {
  std::size_t bytes = message.frame.size();
  for (const transport::Buffer& buffer : message.buffers) bytes += buffer.bytes;
  return bytes;
}

// As the transports tell them apart, which let small messages overtake large ones.
std::size_t stream_of(const transport::Message& message, std::size_t bytes) noexcept {
  return bytes > Session::kSmallBytes || message.buffers.size() > Session::kSmallBuffers ? 1 : 0;
}

// Whether a connection refuses one message, and not all of them because it has ended.
bool concerns_one_message(const Error& error) noexcept {
  switch (error.code()) {
    case ErrorCode::unimplemented:
    case ErrorCode::invalid_argument:
    case ErrorCode::out_of_range:
      return true;
    default:
      return false;
  }
}

// Whether it is the frame of a request: what was withdrawn is one no more.
bool has_time_left(const base::Bytes& frame) noexcept {
  const auto head = transport::peek_frame(frame);
  return head && head->kind == wire::kRequest &&
         head->body.size() >= kTimeLeftOffset + kTimeLeftBytes;
}

}  // namespace

transport::Message Session::empty_frame(std::uint16_t kind) {
  transport::FrameBuilder frame(kind);
  frame.end_body();
  return std::move(frame).finish();
}

Session::~Session() {
  KeptMessage* list = nullptr;
  {
    base::MutexLock lock(mutex_);
    list = take_all();
  }
  const Error gone(ErrorCode::shutting_down, "this worker has shut down");
  while (list != nullptr) {
    KeptMessage& kept = *std::exchange(list, list->next);
    complete(kept, gone);
    release(kept);
  }
}

// ---- sending

void Session::send(transport::Message message, transport::SendDone done, std::uint64_t call_id) {
  auto* const kept =
      new KeptMessage{.message = std::move(message), .done = std::move(done), .call_id = call_id};
  kept->bytes = bytes_of(kept->message);
  kept->stream = stream_of(kept->message, kept->bytes);
  transport::Connection* connection = nullptr;
  ConnectionPtr alive;
  bool unconnected = false;
  bool silent = false;
  KeptMessage* done_with = nullptr;
  std::optional<Error> ended;
  {
    base::MutexLock lock(mutex_);
    if (ended_) [[unlikely]] {
      ended = ended_;
    } else {
      keep(*kept);
      if (usable_) [[likely]] {
        connection = in_use(alive);
        kept->sent = true;
        kept->state.store(2, std::memory_order_relaxed);
      } else {
        unconnected = current_ == nullptr;
      }
      done_with = take_acknowledged();
      if (kept_messages_ >= look_at_messages_ || kept_bytes_ >= look_at_bytes_) [[unlikely]]
        silent = peer_is_silent();
    }
  }
  if (ended) [[unlikely]] {
    kept->message = {};
    complete(*kept, ended);
    release(*kept);
    return;
  }
  if (connection != nullptr) transmit(*kept, *connection);
  complete_all(done_with);
  if (unconnected) events_.on_unconnected();
  if (silent) [[unlikely]]
    close(Error(ErrorCode::overloaded, "it does not acknowledge what it is sent"));
}

void Session::keep(KeptMessage& kept) {
  Stream& stream = streams_[kept.stream];
  kept.number = ++stream.last;
  last_sent_[kept.stream].store(kept.number, std::memory_order_release);
  transport::FrameNumbers numbers;
  numbers.number = kept.number | (kept.stream == 0 ? 0 : transport::FrameNumbers::kLarge);
  numbers.received = received();
  told_.store(numbers.received[0] + numbers.received[1], std::memory_order_relaxed);
  transport::put_numbers(kept.message.frame, numbers);
  if (stream.newest == nullptr) {
    stream.first = &kept;
  } else {
    stream.newest->next = &kept;
  }
  stream.newest = &kept;
  if (!usable_ && stream.unsent == nullptr) stream.unsent = &kept;
  ++kept_messages_;
  kept_bytes_ += kept.bytes;
  sent_bytes_ += kept.bytes;
}

void Session::transmit(KeptMessage& kept, transport::Connection& connection) {
  transmit(kept, base::Bytes::borrowed(kept.message.frame), connection);
}

void Session::transmit(KeptMessage& kept, base::Bytes frame, transport::Connection& connection) {
  connection.send({std::move(frame), kept.message.buffers},
                  [this, &kept](const std::optional<Error>& error) { transmitted(kept, error); });
}

void Session::transmitted(KeptMessage& kept, const std::optional<Error>& error) {
  if (!error) [[likely]] {
    complete(kept, error);
  } else if (concerns_one_message(*error)) {
    return refused(kept, *error);
  }
  // Otherwise the connection has ended: the next one gets the message.
  release(kept);
}

void Session::refused(KeptMessage& kept, const Error& why) {
  transport::Connection* connection = nullptr;
  ConnectionPtr alive;
  transport::Message skip = empty_frame(wire::kSkip);
  bool replaced = false;
  {
    base::MutexLock lock(mutex_);
    replaced = replace(kept, skip);
    const KeptMessage* const unsent = streams_[kept.stream].unsent;
    if (replaced && (unsent == nullptr || unsent->number > kept.number)) connection = in_use(alive);
  }
  if (replaced) {
    complete(kept, why);
  } else {
    close(why);
  }
  if (connection != nullptr) return transmit(kept, *connection);
  release(kept);
}

bool Session::replace(KeptMessage& kept, transport::Message& skip) {
  // If only the list and the caller hold it, no other thread reads the message.
  constexpr std::uint32_t kTwoAndNotTold = 2;
  if (!lists(kept) || kept.state.load(std::memory_order_acquire) != kTwoAndNotTold) return false;
  transport::FrameNumbers numbers;
  numbers.number = kept.number | (kept.stream == 0 ? 0 : transport::FrameNumbers::kLarge);
  numbers.received = received();
  transport::put_numbers(skip.frame, numbers);
  kept_bytes_ -= kept.bytes;
  kept.bytes = skip.frame.size();
  kept_bytes_ += kept.bytes;
  std::swap(kept.message, skip);
  return true;
}

void Session::complete(KeptMessage& kept, const std::optional<Error>& error) {
  if (kept.completed()) return;
  if (kept.set_completed()) return;
  if (!kept.done) return;
  kept.done(error);
  kept.done = nullptr;
}

void Session::release(KeptMessage& kept) {
  if (!kept.drop()) return;
  if (!kept.completed()) [[unlikely]] {
    std::optional<Error> reason;
    {
      base::MutexLock lock(mutex_);
      reason = end_reason_;
    }
    kept.message = {};
    complete(kept, reason ? *reason : Error(ErrorCode::shutting_down, "this worker has shut down"));
  }
  delete &kept;
}

bool Session::peer_is_silent() {
  std::size_t messages = 0;
  std::size_t bytes = 0;
  for (const Stream& stream : streams_) {
    for (const KeptMessage* kept = stream.first; kept != nullptr; kept = kept->next) {
      if (!kept->completed()) continue;
      ++messages;
      bytes += kept->bytes;
    }
  }
  look_at_messages_ = kept_messages_ + kMaxPassedOn / 4;
  look_at_bytes_ = kept_bytes_ + max_passed_on_bytes_ / 4 + 1;
  return messages >= kMaxPassedOn || bytes >= max_passed_on_bytes_;
}

// ---- receiving

Session::Arrival Session::receive(const transport::Message& message) {
  const auto numbers = transport::numbers_of(message.frame);
  acknowledgment_due_ = false;
  if (!numbers) return Arrival::unnumbered;
  for (std::size_t stream = 0; stream < kStreams; ++stream) {
    if (numbers->received[stream] > acknowledged_[stream].load(std::memory_order_relaxed))
      acknowledged(stream, numbers->received[stream]);
  }
  if (numbers->number == 0) {
    free_acknowledged();
    return Arrival::unnumbered;
  }
  const std::size_t stream = (numbers->number & transport::FrameNumbers::kLarge) != 0 ? 1 : 0;
  switch (received_[stream].take(numbers->number & kNumberMask)) {
    case ReceivedNumbers::Taken::fresh:
      break;
    case ReceivedNumbers::Taken::known:
      duplicates_.fetch_add(1, std::memory_order_relaxed);
      return Arrival::drop;
    case ReceivedNumbers::Taken::too_scattered:
      throw Error(ErrorCode::protocol, "more than " + std::to_string(ReceivedNumbers::kMaxGaps) +
                                           " runs of its messages are missing");
  }
  const std::size_t bytes = bytes_of(message);
  untold_bytes_ += bytes;
  received_bytes_.store(received_bytes_.load(std::memory_order_relaxed) + bytes,
                        std::memory_order_relaxed);
  const auto head = transport::peek_frame(message.frame);
  const std::uint16_t kind = head ? head->kind : 0;
  acknowledgment_due_ = true;
  return kind == wire::kSkip ? Arrival::drop : Arrival::deliver;
}

void Session::acknowledged_ahead(const base::Bytes& frame) noexcept {
  constexpr std::size_t kLarge = 1;
  const auto numbers = transport::numbers_of(frame);
  // What makes no sense is refused when the message has arrived.
  if (!numbers || numbers->received[kLarge] > last_sent_[kLarge].load(std::memory_order_acquire))
    return;
  if (numbers->received[kLarge] > acknowledged_[kLarge].load(std::memory_order_relaxed))
    acknowledged(kLarge, numbers->received[kLarge]);
}

bool Session::received_one() {
  const std::uint64_t untold = received_sum() - told_.load(std::memory_order_relaxed);
  if (untold == 0) {
    untold_bytes_ = 0;
    return false;
  }
  if (untold >= kMaxUntoldMessages || untold_bytes_ >= max_untold_bytes_) {
    untold_bytes_ = 0;
    acknowledge();
    return false;
  }
  return acknowledgment_due_ && !acknowledging_.load(std::memory_order_relaxed) &&
         !acknowledging_.exchange(true);
}

void Session::acknowledge() {
  free_acknowledged();
  if (told_.load(std::memory_order_relaxed) >= received_sum()) return;
  transport::Message message = empty_frame(wire::kReceived);
  transport::Connection* connection = nullptr;
  ConnectionPtr alive;
  {
    base::MutexLock lock(mutex_);
    // send_kept() does it when it has sent everything.
    if (!usable_ || ended_) return;
    // A peer that does not read must not make this worker queue one after another.
    received_again_ = received_under_way_;
    if (received_under_way_) return;
    received_under_way_ = true;
    connection = in_use(alive);
    transport::FrameNumbers numbers;
    numbers.received = received();
    told_.store(numbers.received[0] + numbers.received[1], std::memory_order_relaxed);
    transport::put_numbers(message.frame, numbers);
  }
  connection->send(std::move(message),
                   [this](const std::optional<Error>&) { acknowledgment_sent(); });
}

void Session::acknowledgment_sent() {
  {
    base::MutexLock lock(mutex_);
    received_under_way_ = false;
    if (!std::exchange(received_again_, false)) return;
  }
  acknowledge();
}

void Session::acknowledged(std::size_t stream, std::uint64_t number) {
  if (number > last_sent_[stream].load(std::memory_order_acquire))
    throw Error(ErrorCode::protocol,
                "it acknowledges message " + std::to_string(number) + ", which it was not sent");
  // Small messages wait for the next send(); large ones, and many, are freed now.
  auto& known = acknowledged_[stream];
  constexpr std::uint64_t kSomeMessages = 64;
  const std::uint64_t before = known.load(std::memory_order_relaxed);
  if (stream == 0 && number % kSomeMessages != 0 && number - before < kSomeMessages) {
    known.store(number, std::memory_order_relaxed);
    return;
  }
  {
    base::MutexLock lock(mutex_);
    if (number > known.load(std::memory_order_relaxed))
      known.store(number, std::memory_order_relaxed);
  }
  free_acknowledged();
}

Session::KeptMessage* Session::take_all() {
  KeptMessage* list = nullptr;
  KeptMessage** end = &list;
  for (Stream& stream : streams_) {
    *end = stream.first;
    if (stream.newest != nullptr) end = &stream.newest->next;
    stream.first = stream.newest = stream.unsent = nullptr;
  }
  kept_messages_ = kept_bytes_ = 0;
  return list;
}

Session::KeptMessage* Session::take_acknowledged() {
  KeptMessage* list = nullptr;
  KeptMessage** end = &list;
  for (std::size_t i = 0; i < kStreams; ++i) {
    Stream& stream = streams_[i];
    const std::uint64_t number = acknowledged_[i].load(std::memory_order_relaxed);
    while (stream.first != nullptr && stream.first->number <= number) {
      KeptMessage* const kept = stream.first;
      stream.first = kept->next;
      if (stream.unsent == kept) stream.unsent = kept->next;
      if (stream.first == nullptr) stream.newest = nullptr;
      --kept_messages_;
      kept_bytes_ -= kept->bytes;
      kept->next = nullptr;
      *end = kept;
      end = &kept->next;
    }
  }
  return list;
}

void Session::free_acknowledged() {
  KeptMessage* done_with = nullptr;
  {
    base::MutexLock lock(mutex_);
    done_with = take_acknowledged();
  }
  complete_all(done_with);
}

void Session::complete_all(KeptMessage* list) {
  while (list != nullptr) {
    KeptMessage& kept = *std::exchange(list, list->next);
    complete(kept, std::nullopt);
    release(kept);
  }
}

// ---- its connections

void Session::attach(const ConnectionPtr& connection, std::uint64_t generation,
                     const Received& received_by_peer) {
  ConnectionPtr former;
  {
    base::MutexLock lock(mutex_);
    if (ended_ || generation <= generation_) return;
    for (std::size_t i = 0; i < kStreams; ++i) {
      if (received_by_peer[i] > streams_[i].last)
        throw Error(ErrorCode::protocol, "it acknowledges message " +
                                             std::to_string(received_by_peer[i]) +
                                             ", which it was not sent");
    }
    if (first_ == nullptr) first_ = connection;
    ++connections_;
    generation_ = generation;
    usable_ = false;
    within_host_.store(connection->within_host(), std::memory_order_relaxed);
    former = std::exchange(current_, connection);
    first_in_use_.store(current_ == first_ ? first_.get() : nullptr, std::memory_order_release);
    for (std::size_t i = 0; i < kStreams; ++i) {
      if (received_by_peer[i] > acknowledged_[i].load())
        acknowledged_[i].store(received_by_peer[i]);
      streams_[i].unsent = streams_[i].first;
    }
  }
  send_kept(generation);
}

void Session::send_kept(std::uint64_t generation) {
  constexpr std::size_t kBatch = 256;
  struct ToSend {
    KeptMessage* kept;
    bool first;
  };
  std::array<ToSend, kBatch> batch;
  for (;;) {
    std::size_t count = 0;
    KeptMessage* done_with = nullptr;
    ConnectionPtr connection;
    {
      base::MutexLock lock(mutex_);
      connection = current_;
      if (ended_ || generation_ != generation || connection == nullptr) return;
      done_with = take_acknowledged();
      for (Stream& stream : streams_) {
        while (stream.unsent != nullptr && count < kBatch) {
          KeptMessage& kept = *stream.unsent;
          stream.unsent = kept.next;
          kept.state.fetch_add(1, std::memory_order_relaxed);
          const bool first = !std::exchange(kept.sent, true);
          resent_ += first ? 0 : 1;
          batch[count++] = {&kept, first};
        }
      }
      usable_ = count == 0;
    }
    complete_all(done_with);
    if (count == 0) break;
    for (const ToSend& each : std::span(batch).first(count)) {
      if (each.kept->call_id == 0) {
        transmit(*each.kept, *connection);
      } else {
        transmit_request(*each.kept, each.first, *connection);
      }
    }
  }
  // What came meanwhile could not be acknowledged.
  acknowledge();
}

bool Session::lists(const KeptMessage& kept) const {
  const KeptMessage* const first = streams_[kept.stream].first;
  return first != nullptr && first->number <= kept.number;
}

void Session::transmit_request(KeptMessage& kept, bool first, transport::Connection& connection) {
  const auto deadline = events_.deadline(kept.call_id);
  if (first && !deadline) withdraw_unwanted(kept);
  const TimeLeft left = time_left(deadline);
  if (!has_time_left(kept.message.frame) || change_time_left(kept, left))
    return transmit(kept, connection);
  // The former connection may not have let go of it yet.
  base::Bytes copy;
  copy.append(kept.message.frame.data(), kept.message.frame.size());
  put_time_left(copy, left);
  transmit(kept, std::move(copy), connection);
}

bool Session::change_time_left(KeptMessage& kept, const TimeLeft& time) {
  base::MutexLock lock(mutex_);
  // As in replace(): only the list and the caller hold it.
  if (!lists(kept) || kept.holders() != 2) return false;
  put_time_left(kept.message.frame, time);
  return true;
}

void Session::withdraw_unwanted(KeptMessage& kept) {
  transport::Message skip = empty_frame(wire::kSkip);
  bool replaced = false;
  {
    base::MutexLock lock(mutex_);
    replaced = replace(kept, skip);
  }
  if (replaced)
    complete(kept, Error(ErrorCode::cancelled, "it was not wanted any more before it was sent"));
}

void Session::beat(const Digests& digests) noexcept {
  if (beat_under_way_.exchange(true)) return;
  transport::FrameBuilder frame(wire::kHeartbeat);
  base::ByteWriter out(frame.body());
  for (const std::uint64_t each : digests) out.write(each);
  frame.end_body();
  transport::Message message = std::move(frame).finish();
  transport::Connection* connection = nullptr;
  ConnectionPtr alive;
  {
    base::MutexLock lock(mutex_);
    if (usable_ && !ended_) {
      connection = in_use(alive);
      transport::FrameNumbers numbers;
      numbers.received = received();
      told_.store(numbers.received[0] + numbers.received[1], std::memory_order_relaxed);
      transport::put_numbers(message.frame, numbers);
    }
  }
  if (connection == nullptr) return beat_under_way_.store(false);
  connection->send(std::move(message),
                   [this](const std::optional<Error>&) { beat_under_way_.store(false); });
}

void Session::detach(const ConnectionPtr& connection) {
  ConnectionPtr former;
  base::MutexLock lock(mutex_);
  if (current_ != connection) return;
  former = std::exchange(current_, nullptr);
  first_in_use_.store(nullptr, std::memory_order_release);
  usable_ = false;
  for (Stream& stream : streams_) stream.unsent = stream.first;
}

void Session::fail_waiting(const Error& why) {
  KeptMessage* list = nullptr;
  {
    base::MutexLock lock(mutex_);
    if (generation_ != 0 || ended_) return;
    list = take_all();
    streams_ = {};
    for (auto& last : last_sent_) last.store(0);
  }
  while (list != nullptr) {
    KeptMessage& kept = *std::exchange(list, list->next);
    kept.message = {};
    complete(kept, why);
    release(kept);
  }
}

void Session::end(const Error& reason, const Error& later) {
  KeptMessage* list = nullptr;
  ConnectionPtr former;
  {
    base::MutexLock lock(mutex_);
    if (ended_) return;
    ended_ = later;
    end_reason_ = reason;
    usable_ = false;
    former = std::exchange(current_, nullptr);
    first_in_use_.store(nullptr, std::memory_order_release);
    list = take_all();
  }
  // What a transport holds may still be passed on: it tells, as the last holder.
  while (list != nullptr) release(*std::exchange(list, list->next));
}

Session::Statistics Session::statistics() const {
  base::MutexLock lock(mutex_);
  return {connections_ == 0 ? 0 : connections_ - 1,
          resent_,
          duplicates_.load(std::memory_order_relaxed),
          kept_messages_,
          kept_bytes_,
          streams_[0].last + streams_[1].last,
          sent_bytes_,
          received_sum(),
          received_bytes_.load(std::memory_order_relaxed)};
}

bool Session::awaits(Unacknowledged what) const {
  base::MutexLock lock(mutex_);
  constexpr std::size_t kLargeStream = 1;
  for (std::size_t i = what == Unacknowledged::large ? kLargeStream : 0; i < kStreams; ++i) {
    // What has been acknowledged may still be in the list.
    const KeptMessage* const newest = streams_[i].newest;
    if (newest != nullptr && newest->number > acknowledged_[i].load()) return true;
  }
  return false;
}

// ---- as a Connection

const transport::Hello& Session::peer() const {
  static const transport::Hello kNone;
  base::MutexLock lock(mutex_);
  return first_ == nullptr ? kNone : first_->peer();
}

Session::ConnectionPtr Session::current() const {
  base::MutexLock lock(mutex_);
  return current_;
}

bool Session::defer(transport::DeferredWork& work) {
  if (auto* const first = first_in_use_.load(std::memory_order_acquire)) return first->defer(work);
  const ConnectionPtr connection = current();
  return connection != nullptr && connection->defer(work);
}

void Session::blocking_work_done() {
  if (auto* const first = first_in_use_.load(std::memory_order_acquire))
    return first->blocking_work_done();
  const ConnectionPtr connection = current();
  if (connection != nullptr) connection->blocking_work_done();
}

std::string Session::describe() const {
  const ConnectionPtr connection = current();
  return connection != nullptr ? connection->describe() : "session without a connection";
}

}  // namespace stitch::rpc
