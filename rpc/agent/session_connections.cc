// The connections of a Session: from one to the next, and the end.

#include <utility>
#include <vector>

#include "stitch/rpc/agent/kept_message.h"
#include "stitch/rpc/agent/session.h"

namespace stitch::rpc {

void Session::attach(const ConnectionPtr& connection, std::uint64_t generation,
                     const Received& received_by_peer) {
  bool paused = false;
  {
    base::MutexLock lock(mutex_);
    if (ended_ || generation <= generation_) return;
    for (std::size_t i = 0; i < kStreams; ++i) {
      if (received_by_peer[i] > streams_[i].last)
        throw Error(ErrorCode::protocol, "it acknowledges messages that it was not sent");
    }
    used_.push_back(connection);
    generation_ = generation;
    usable_ = false;
    current_.store(connection.get());
    for (std::size_t i = 0; i < kStreams; ++i) {
      if (received_by_peer[i] > acknowledged_[i].load())
        acknowledged_[i].store(received_by_peer[i]);
      streams_[i].unsent = streams_[i].first;
    }
    paused = paused_;
  }
  if (paused) connection->pause_reading(true);
  send_kept(generation);
}

void Session::send_kept(std::uint64_t generation) {
  constexpr std::size_t kBatch = 256;
  struct ToSend {
    Kept* kept;
    bool first;
  };
  std::vector<ToSend> batch;
  batch.reserve(kBatch);
  for (;;) {
    batch.clear();
    Kept* done_with = nullptr;
    transport::Connection* connection = nullptr;
    {
      base::MutexLock lock(mutex_);
      connection = current_.load(std::memory_order_relaxed);
      if (ended_ || generation_ != generation || connection == nullptr) return;
      done_with = take_acknowledged();
      for (Stream& stream : streams_) {
        while (stream.unsent != nullptr && batch.size() < kBatch) {
          Kept& kept = *stream.unsent;
          stream.unsent = kept.next;
          kept.holders.fetch_add(1, std::memory_order_relaxed);
          const bool first = !std::exchange(kept.sent, true);
          resent_ += first ? 0 : 1;
          batch.push_back({&kept, first});
        }
      }
      usable_ = batch.empty();
    }
    settle(done_with);
    if (batch.empty()) return;
    for (const ToSend& each : batch) {
      if (each.first && each.kept->call_id != 0 && !events_.wanted(each.kept->call_id)) {
        withdraw(*each.kept,
                 Error(ErrorCode::cancelled, "it was not wanted any more before it was sent"));
      }
      transmit(*each.kept, *connection);
    }
  }
}

void Session::detach(const ConnectionPtr& connection) {
  base::MutexLock lock(mutex_);
  if (current_.load(std::memory_order_relaxed) != connection.get()) return;
  current_.store(nullptr);
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
  {
    base::MutexLock lock(mutex_);
    if (ended_) return;
    ended_ = later;
    usable_ = false;
    current_.store(nullptr);
    Kept** end = &list;
    for (Stream& stream : streams_) {
      *end = stream.first;
      if (stream.newest != nullptr) end = &stream.newest->next;
      stream.first = stream.newest = stream.unsent = nullptr;
    }
    kept_messages_ = kept_bytes_ = 0;
  }
  while (list != nullptr) {
    Kept& kept = *std::exchange(list, list->next);
    if (kept.holders.load(std::memory_order_acquire) == 1) kept.message = {};
    tell(kept, reason);
    release(kept);
  }
}

Session::Statistics Session::statistics() const {
  base::MutexLock lock(mutex_);
  return {used_.empty() ? 0 : used_.size() - 1, resent_,
          duplicates_.load(std::memory_order_relaxed), kept_messages_, kept_bytes_};
}

bool Session::keeps_something() const {
  base::MutexLock lock(mutex_);
  return kept_messages_ > 0;
}

// ---- as a Connection

const transport::Hello& Session::peer() const {
  static const transport::Hello kNone;
  base::MutexLock lock(mutex_);
  return used_.empty() ? kNone : used_.back()->peer();
}

bool Session::defer(base::UniqueFunction<bool(bool here)>& work) {
  transport::Connection* const connection = current_.load(std::memory_order_acquire);
  return connection != nullptr && connection->defer(work);
}

void Session::pause_reading(bool paused) {
  transport::Connection* connection = nullptr;
  {
    base::MutexLock lock(mutex_);
    paused_ = paused;
    connection = current_.load(std::memory_order_relaxed);
  }
  if (connection != nullptr) connection->pause_reading(paused);
}

void Session::blocking_work_done() {
  if (auto* const connection = current_.load(std::memory_order_acquire))
    connection->blocking_work_done();
}

std::string Session::describe() const {
  const auto* const connection = current_.load(std::memory_order_acquire);
  return connection != nullptr ? connection->describe() : "session without a connection";
}

}  // namespace stitch::rpc
