#include "stitch/rpc/peers/frame_queue.h"

#include <utility>

namespace stitch::rpc {

bool FrameQueue::take(std::size_t bytes) noexcept {
  std::size_t before = unwritten_.load();
  do {
    if (before != 0 && before + bytes > limit_) return false;
  } while (!unwritten_.compare_exchange_weak(before, before + bytes));
  return true;
}

void FrameQueue::wait(std::size_t bytes, const void* owner, Go go) {
  {
    base::MutexLock lock(mutex_);
    frames_.push_back({bytes, owner, std::move(go)});
    waiting_bytes_.fetch_add(bytes);
    waiting_.fetch_add(1);  // before room is looked for: who makes some looks at it then
  }
  pump();
}

void FrameQueue::drop(const void* owner) noexcept {
  std::list<QueuedFrame> dropped;
  {
    base::MutexLock lock(mutex_);
    for (auto at = frames_.begin(); at != frames_.end();) {
      const auto each = at++;
      if (each->owner != owner) continue;
      waiting_bytes_.fetch_sub(each->bytes);
      waiting_.fetch_sub(1);
      dropped.splice(dropped.end(), frames_, each);
    }
  }
  if (dropped.empty()) return;
  for (QueuedFrame& frame : dropped) frame.go(false);
  dropped.clear();
  pump();  // one of them may have been the first
}

void FrameQueue::pump() noexcept {
  base::MutexLock lock(mutex_);
  pump_again_ = pumping_;
  if (pumping_) return;
  pumping_ = true;
  do {
    pump_again_ = false;
    while (!frames_.empty() && (given_up_ || take(frames_.front().bytes))) {
      std::list<QueuedFrame> first;
      first.splice(first.end(), frames_, frames_.begin());
      const std::size_t bytes = first.front().bytes;
      waiting_bytes_.fetch_sub(bytes);
      if (given_up_) unwritten_.fetch_add(bytes);
      lock.unlock();
      first.front().go(true);
      first.clear();
      waiting_.fetch_sub(1);  // after it was sent: until then later ones wait
      lock.lock();
    }
  } while (pump_again_);
  pumping_ = false;
}

void FrameQueue::give_up() noexcept {
  {
    base::MutexLock lock(mutex_);
    given_up_ = true;
  }
  pump();
}

}  // namespace stitch::rpc
