#include "stitch/rref/ordered_calls.h"

#include <string>

#include "stitch/base/byte_io.h"
#include "stitch/base/error.h"

namespace stitch::rref {

OrderedCalls::Arrived::~Arrived() {
  if (calls_) calls_->end({caller_, place_.stream}, place_.number);
}

void OrderedCalls::Arrived::wait(Start start) const {
  const Key key{caller_, place_.stream};
  {
    const base::MutexLock lock(calls_->mutex_);
    const auto found = calls_->streams_.find(key);
    if (found != calls_->streams_.end()) {
      found->second.slots[place_.number].start = std::move(start);
      calls_->start_due(key);
      return;
    }
  }
  start();
}

OrderedCalls::Arrived OrderedCalls::arrive(const WorkerLife& caller, const PlaceInOrder& place) {
  Arrived arrived;
  const base::MutexLock lock(mutex_);
  if (closed_ || lost_.contains(caller)) return arrived;
  Stream& stream = this->stream({caller, place.stream});
  if (place.number < stream.next || stream.slots.contains(place.number)) {
    throw Error(ErrorCode::protocol, "ordered request " + std::to_string(place.number) +
                                         " has arrived before through the same handle");
  }
  stream.slots[place.number];
  arrived.caller_ = caller;
  arrived.place_ = place;
  arrived.calls_ = shared_from_this();
  return arrived;
}

void OrderedCalls::on_frame(const WorkerLife& caller, std::span<const std::byte> frame) {
  base::ByteReader in(frame, "order of requests");
  const auto id = in.read<std::uint64_t>();
  const bool end = in.read<std::uint8_t>() != 0;
  const auto number = in.read<std::uint64_t>();
  in.expect_end();
  const Key key{caller, id};
  if (!end) {
    {
      const base::MutexLock lock(mutex_);
      const auto known = callers_.find(caller);
      if (known != callers_.end() && known->second.ended_early >= kMaxEndedEarlyOfACaller)
        throw Error(ErrorCode::protocol, "a peer has too many ordered requests that ended early");
    }
    static_cast<void>(arrive(caller, {id, number}));  // and ends
    return;
  }
  const base::MutexLock lock(mutex_);
  if (closed_ || lost_.contains(caller)) return;
  stream(key).total = number;
  start_due(key);
}

OrderedCalls::Stream& OrderedCalls::stream(const Key& key) {
  const auto found = streams_.find(key);
  if (found != streams_.end()) return found->second;
  std::size_t& count = callers_[key.caller].streams;
  if (count >= kMaxStreamsOfACaller)
    throw Error(ErrorCode::protocol, "a peer has too many ordered handles");
  Stream& added = streams_[key];
  ++count;
  return added;
}

void OrderedCalls::end(const Key& key, std::uint64_t number) noexcept {
  const base::MutexLock lock(mutex_);
  const auto found = streams_.find(key);
  if (found == streams_.end()) return;
  const auto slot = found->second.slots.find(number);
  if (slot == found->second.slots.end()) return;
  slot->second.ended = true;
  slot->second.early = number != found->second.next;
  if (slot->second.early) ++callers_[key.caller].ended_early;
  start_due(key);
}

// Starts the next request if it waits. Requests may end inside start(): the outermost call starts
// them all, so that a long queue needs no deep stack.
void OrderedCalls::start_due(const Key& key) {
  for (bool first = true;; first = false) {
    const auto found = streams_.find(key);  // again: it may have gone while the lock was released
    if (found == streams_.end()) return;
    Stream& stream = found->second;
    if (first && stream.starting) return;
    stream.starting = false;
    while (!stream.slots.empty() && stream.slots.begin()->first == stream.next &&
           stream.slots.begin()->second.ended) {
      if (stream.slots.begin()->second.early) --callers_[key.caller].ended_early;
      stream.slots.erase(stream.slots.begin());
      ++stream.next;
    }
    if (stream.total == stream.next && stream.slots.empty()) {
      if (--callers_[key.caller].streams == 0) callers_.erase(key.caller);
      streams_.erase(found);
      return;
    }
    const auto next = stream.slots.find(stream.next);
    if (next == stream.slots.end() || !next->second.start) return;
    Start start = std::move(next->second.start);
    stream.starting = true;
    mutex_.unlock();
    try {
      start();
    } catch (...) {
      // Out of memory: the request is dropped, which answers it and ends its number.
    }
    start = nullptr;
    mutex_.lock();
  }
}

std::vector<OrderedCalls::Start> OrderedCalls::take_waiting(Stream& stream) {
  std::vector<Start> waiting;
  for (auto& [number, slot] : stream.slots) {
    if (slot.start) waiting.push_back(std::move(slot.start));
  }
  return waiting;
}

void OrderedCalls::caller_lost(const WorkerLife& caller) {
  std::vector<Start> waiting;
  {
    const base::MutexLock lock(mutex_);
    lost_.insert(caller);
    callers_.erase(caller);
    for (auto at = streams_.begin(); at != streams_.end();) {
      if (at->first.caller != caller) {
        ++at;
        continue;
      }
      for (Start& start : take_waiting(at->second)) waiting.push_back(std::move(start));
      at = streams_.erase(at);
    }
  }
  for (Start& start : waiting) start();
}

void OrderedCalls::close() {
  std::vector<Start> waiting;
  {
    const base::MutexLock lock(mutex_);
    closed_ = true;
    for (auto& [key, stream] : streams_) {
      for (Start& start : take_waiting(stream)) waiting.push_back(std::move(start));
    }
    streams_.clear();
    callers_.clear();
  }
  for (Start& start : waiting) start();
}

OrderedCalls::Counts OrderedCalls::counts() const {
  const base::MutexLock lock(mutex_);
  Counts counts;
  counts.streams = streams_.size();
  for (const auto& [key, stream] : streams_) {
    for (const auto& [number, slot] : stream.slots) counts.waiting += slot.start ? 1 : 0;
  }
  return counts;
}

}  // namespace stitch::rref
