// What a PeerFlow counts of replies and frames: see "replies to the peer" in its header.
#include <algorithm>
#include <exception>
#include <new>
#include <utility>

#include "stitch/rpc/agent/peer_flow.h"

namespace stitch::rpc {

bool PeerFlow::add_data(std::size_t bytes) noexcept {
  if (data_bytes_.fetch_add(bytes) + bytes <= limits_.bytes) return true;
  data_written(bytes);
  return false;
}

// A frame of at most a quarter of the limit finds room in half of it; a larger one needs less to be
// unwritten than that, and nothing if both would exceed the limit.
std::size_t PeerFlow::data_before(std::size_t frame_bytes) const noexcept {
  const std::size_t half = limits_.bytes / 2;
  const std::size_t quarter = limits_.bytes / 4;
  if (frame_bytes <= quarter) return half - frame_bytes;
  return frame_bytes + quarter <= limits_.bytes ? quarter : 0;
}

bool PeerFlow::take_frame(std::size_t bytes) noexcept {
  std::size_t before = data_bytes_.load();
  do {
    if (before > data_before(bytes)) return false;
  } while (!data_bytes_.compare_exchange_weak(before, before + bytes));
  return true;
}

bool PeerFlow::try_begin_frame(std::size_t bytes) noexcept {
  return frames_waiting_.load() == 0 && take_frame(bytes);
}

void PeerFlow::wait_frame(std::size_t bytes, base::UniqueFunction<void()> go) {
  {
    base::MutexLock lock(mutex_);
    frames_.push_back({bytes, std::move(go)});
    frame_bytes_ += bytes;
    frames_waiting_.fetch_add(1);  // before room is looked for: who makes some looks at it then
    note_first_frame();
  }
  pump_frames();
}

// While a frame waits, no handler begins that would keep its room taken with its reply.
void PeerFlow::note_first_frame() noexcept {
  const std::size_t half = limits_.bytes / 2;
  many_data_.store(frames_.empty() ? half : std::min(half, data_before(frames_.front().bytes)));
}

// One thread at a time, so that frames keep their order.
void PeerFlow::pump_frames() noexcept {
  base::MutexLock lock(mutex_);
  if (pumping_frames_) {
    pump_frames_again_ = true;
    return;
  }
  pumping_frames_ = true;
  for (;;) {
    pump_frames_again_ = false;
    const bool room = !frames_.empty() && (given_up_ || take_frame(frames_.front().bytes));
    if (!room) {
      if (pump_frames_again_) continue;
      break;
    }
    WaitingFrame frame = std::move(frames_.front());
    frames_.pop_front();
    frame_bytes_ -= frame.bytes;
    note_first_frame();
    if (given_up_) data_bytes_.fetch_add(frame.bytes);
    lock.unlock();
    try {
      frame.go();
    } catch (const std::exception&) {
      // Who waits for it has been told; it had no memory for what follows from that.
    }
    frame.go = nullptr;
    frames_waiting_.fetch_sub(1);  // after it was sent: until then later ones wait
    lock.lock();
  }
  pumping_frames_ = false;
}

bool PeerFlow::park(base::UniqueFunction<void()>& task) {
  base::MutexLock lock(mutex_);
  parked_count_.fetch_add(1);  // first: who writes a reply looks at it afterwards
  if (given_up_ || data_bytes_.load() <= many_data_.load()) {
    parked_count_.fetch_sub(1);
    return false;
  }
  try {
    parked_.push_back(std::move(task));
  } catch (const std::bad_alloc&) {
    parked_count_.fetch_sub(1);
    return false;
  }
  return true;
}

void PeerFlow::unpark() noexcept {
  std::deque<base::UniqueFunction<void()>> tasks;
  {
    base::MutexLock lock(mutex_);
    tasks.swap(parked_);
    parked_count_.fetch_sub(tasks.size());
  }
  for (auto& task : tasks) task();
}

}  // namespace stitch::rpc
