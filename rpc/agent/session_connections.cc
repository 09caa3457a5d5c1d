// The connections of a Session: from one to the next, and the end.

#include <array>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <string>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/rpc/agent/kept_message.h"
#include "stitch/rpc/agent/session.h"
#include "stitch/rpc/message/frame_kinds.h"

namespace stitch::rpc {

namespace {

// Whether it is the frame of a request: what was withdrawn is one no more.
bool has_time_left(const base::Bytes& frame) noexcept {
  const auto head = transport::peek_frame(frame);
  return head && head->kind == wire::kRequest &&
         head->body.size() >= kTimeLeftOffset + kTimeLeftBytes;
}

}  // namespace

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
    Kept* kept;
    bool first;
  };
  std::array<ToSend, kBatch> batch;  // takes no memory: the peer would be given up without it
  for (;;) {
    std::size_t count = 0;
    Kept* done_with = nullptr;
    ConnectionPtr connection;
    {
      base::MutexLock lock(mutex_);
      connection = current_;
      if (ended_ || generation_ != generation || connection == nullptr) return;
      done_with = take_acknowledged();
      for (Stream& stream : streams_) {
        while (stream.unsent != nullptr && count < kBatch) {
          Kept& kept = *stream.unsent;
          stream.unsent = kept.next;
          kept.state.fetch_add(1, std::memory_order_relaxed);
          const bool first = !std::exchange(kept.sent, true);
          resent_ += first ? 0 : 1;
          batch[count++] = {&kept, first};
        }
      }
      usable_ = count == 0;
    }
    settle(done_with);
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

bool Session::lists(const Kept& kept) const {
  const Kept* const first = streams_[kept.stream].first;
  return first != nullptr && first->number <= kept.number;
}

void Session::transmit_request(Kept& kept, bool first, transport::Connection& connection) {
  const auto deadline = events_.deadline(kept.call_id);
  if (first && !deadline) withdraw_unwanted(kept);
  const TimeLeft left = time_left(deadline);
  if (!has_time_left(kept.message.frame) || change_time_left(kept, left))
    return transmit(kept, connection);
  // The former connection may not have let go of it yet.
  base::Bytes copy;
  try {
    copy.append(kept.message.frame.data(), kept.message.frame.size());
  } catch (const std::bad_alloc&) {
    return transmit(kept, connection);  // with the time that it had
  }
  put_time_left(copy, left);
  transmit(kept, std::move(copy), connection);
}

bool Session::change_time_left(Kept& kept, const TimeLeft& time) {
  base::MutexLock lock(mutex_);
  // As in replace(): only the list and the caller hold it.
  if (!lists(kept) || kept.holders() != 2) return false;
  put_time_left(kept.message.frame, time);
  return true;
}

void Session::withdraw_unwanted(Kept& kept) {
  try {
    const Error why(ErrorCode::cancelled, "it was not wanted any more before it was sent");
    transport::Message skip = empty_frame(wire::kSkip);
    bool replaced = false;
    {
      base::MutexLock lock(mutex_);
      replaced = replace(kept, skip);
    }
    if (replaced) tell(kept, why);
  } catch (...) {
    // No memory for that: it is sent.
  }
}

void Session::beat(std::uint64_t digest) noexcept {
  if (beat_under_way_.exchange(true)) return;
  transport::FrameBuilder frame(wire::kHeartbeat);
  base::ByteWriter(frame.body()).write(digest);
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
  Kept* list = nullptr;
  {
    base::MutexLock lock(mutex_);
    if (generation_ != 0 || ended_) return;
    Kept** end = &list;
    for (Stream& stream : streams_) {
      *end = stream.first;
      if (stream.newest != nullptr) end = &stream.newest->next;
      stream = {};
    }
    for (auto& last : last_sent_) last.store(0);
    kept_messages_ = kept_bytes_ = 0;
  }
  while (list != nullptr) {
    Kept& kept = *std::exchange(list, list->next);
    kept.message = {};
    tell(kept, why);
    release(kept);
  }
}

void Session::end(const Error& reason, const Error& later) {
  Kept* list = nullptr;
  ConnectionPtr former;
  {
    base::MutexLock lock(mutex_);
    if (ended_) return;
    ended_ = later;
    end_reason_ = reason;
    usable_ = false;
    former = std::exchange(current_, nullptr);
    first_in_use_.store(nullptr, std::memory_order_release);
    Kept** end = &list;
    for (Stream& stream : streams_) {
      *end = stream.first;
      if (stream.newest != nullptr) end = &stream.newest->next;
      stream.first = stream.newest = stream.unsent = nullptr;
    }
    kept_messages_ = kept_bytes_ = 0;
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
    const Kept* const newest = streams_[i].newest;
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

bool Session::defer(transport::DeferredWork& work) {
  if (auto* const first = first_in_use_.load(std::memory_order_acquire)) return first->defer(work);
  ConnectionPtr connection;
  {
    base::MutexLock lock(mutex_);
    connection = current_;
  }
  return connection != nullptr && connection->defer(work);
}

void Session::blocking_work_done() {
  if (auto* const first = first_in_use_.load(std::memory_order_acquire))
    return first->blocking_work_done();
  ConnectionPtr connection;
  {
    base::MutexLock lock(mutex_);
    connection = current_;
  }
  if (connection != nullptr) connection->blocking_work_done();
}

std::string Session::describe() const {
  ConnectionPtr connection;
  {
    base::MutexLock lock(mutex_);
    connection = current_;
  }
  return connection != nullptr ? connection->describe() : "session without a connection";
}

}  // namespace stitch::rpc
