// What a PeerFlow counts of replies and frames: see there.
#include <algorithm>
#include <exception>
#include <new>
#include <utility>

#include "stitch/rpc/agent/peer_flow.h"

namespace stitch::rpc {

// ---- replies

// One of any size goes when no other is with the transport.
bool PeerFlow::take_reply(std::size_t bytes) noexcept {
  std::size_t before = replies_begun_.load();
  do {
    if (before != 0 && before + bytes > limits_.bytes) return false;
  } while (!replies_begun_.compare_exchange_weak(before, before + bytes));
  return true;
}

void PeerFlow::wait_reply(std::size_t bytes, base::UniqueFunction<void()> go) {
  {
    base::MutexLock lock(mutex_);
    replies_.push_back({bytes, std::move(go)});
    replies_waiting_.fetch_add(1);  // before room is looked for: who makes some looks at it then
  }
  pump_replies();
}

// One thread at a time, so that replies keep their order.
void PeerFlow::pump_replies() noexcept {
  base::MutexLock lock(mutex_);
  if (pumping_replies_) {
    pump_replies_again_ = true;
    return;
  }
  pumping_replies_ = true;
  for (;;) {
    pump_replies_again_ = false;
    const bool room = !replies_.empty() && (given_up_ || take_reply(replies_.front().bytes));
    if (!room) {
      if (pump_replies_again_) continue;
      break;
    }
    std::list<WaitingReply> first;
    first.splice(first.end(), replies_, replies_.begin());
    if (given_up_) replies_begun_.fetch_add(first.front().bytes);
    lock.unlock();
    try {
      first.front().go();
    } catch (const std::exception&) {
      // Its caller has been told, or will be by the end of the connection.
    }
    first.clear();
    replies_waiting_.fetch_sub(1);  // after it was sent: until then later ones wait
    lock.lock();
  }
  pumping_replies_ = false;
}

// ---- frames

bool PeerFlow::take_frame(std::size_t bytes) noexcept {
  std::size_t before = frames_unwritten_.load();
  do {
    if (before != 0 && before + bytes > limits_.bytes / 2) return false;
  } while (!frames_unwritten_.compare_exchange_weak(before, before + bytes));
  return true;
}

bool PeerFlow::try_begin_frame(std::size_t bytes) noexcept {
  return frames_waiting_.load() == 0 && take_frame(bytes);
}

void PeerFlow::wait_frame(std::size_t bytes, const void* owner, FrameGo go) {
  {
    base::MutexLock lock(mutex_);
    frames_.push_back({bytes, owner, std::move(go)});
    waiting_frame_bytes_.fetch_add(bytes);
    frames_waiting_.fetch_add(1);  // before room is looked for: who makes some looks at it then
  }
  pump_frames();
}

void PeerFlow::drop_frames(const void* owner) noexcept {
  std::list<WaitingFrame> dropped;
  {
    base::MutexLock lock(mutex_);
    for (auto at = frames_.begin(); at != frames_.end();) {
      const auto each = at++;
      if (each->owner != owner) continue;
      waiting_frame_bytes_.fetch_sub(each->bytes);
      frames_waiting_.fetch_sub(1);
      dropped.splice(dropped.end(), frames_, each);
    }
  }
  if (dropped.empty()) return;
  for (WaitingFrame& frame : dropped) {
    try {
      frame.go(false);
    } catch (const std::exception&) {
      // As in pump_frames().
    }
  }
  dropped.clear();
  pump_frames();  // one of them may have been the first
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
    std::list<WaitingFrame> first;
    first.splice(first.end(), frames_, frames_.begin());
    const std::size_t bytes = first.front().bytes;
    waiting_frame_bytes_.fetch_sub(bytes);
    if (given_up_) frames_unwritten_.fetch_add(bytes);
    lock.unlock();
    try {
      first.front().go(true);
    } catch (const std::exception&) {
      // Who waits for it has been told; it had no memory for what follows from that.
    }
    first.clear();
    frames_waiting_.fetch_sub(1);  // after it was sent: until then later ones wait
    lock.lock();
  }
  pumping_frames_ = false;
}

// ---- handlers that would make more replies

bool PeerFlow::park(base::UniqueFunction<void()>& task) {
  base::MutexLock lock(mutex_);
  parked_count_.fetch_add(1);  // first: who writes a reply looks at it afterwards
  if (given_up_ || (data_bytes_.load() <= limits_.bytes / 2 && parked_.empty())) {
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
  std::list<base::UniqueFunction<void()>> tasks;  // takes no memory
  {
    base::MutexLock lock(mutex_);
    tasks.swap(parked_);
    parked_count_.fetch_sub(tasks.size());
  }
  for (auto& task : tasks) {
    try {
      task();
    } catch (const std::exception&) {
      // No memory for it: the call that it drops is answered with an error.
    }
  }
}

}  // namespace stitch::rpc
