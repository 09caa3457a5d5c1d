#pragma once

#include <atomic>
#include <memory>

namespace stitch {

// Says that this thread is about to wait, as long as it lives, for something that the pool does not
// notice by itself: a mutex, a condition variable, a read from disk. On a user-function thread the
// pool adds a thread meanwhile if none is free; elsewhere it does nothing. Waits for futures need
// none.
class BlockingRegion {
 public:
  BlockingRegion();
  ~BlockingRegion();
  BlockingRegion(const BlockingRegion&) = delete;
  BlockingRegion& operator=(const BlockingRegion&) = delete;

 private:
  const std::shared_ptr<void> pool_;  // of type rpc::ThreadPool::State; null elsewhere
  std::atomic<int>* const waits_;     // of the call whose function runs here; may be null
};

}  // namespace stitch
