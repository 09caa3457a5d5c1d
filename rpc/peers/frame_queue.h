#pragma once

#include <atomic>
#include <cstddef>
#include <list>

#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"

namespace stitch::rpc {

// Frames of data to one peer (gradients), which are no calls: those that the transport has not
// written take at most `limit` bytes, a larger frame goes alone, and the others wait here in their
// order. No thread waits. Thread contract: any thread; no lock is held while a `go` is called.
class FrameQueue {
 public:
  explicit FrameQueue(std::size_t limit) : limit_(limit) {}

  // Counts a frame as unwritten. False, and it is not counted: it goes through wait().
  [[nodiscard]] bool try_begin(std::size_t bytes) noexcept {
    return waiting_.load() == 0 && take(bytes);
  }
  // Keeps a frame until there is room, behind those that wait already. `go(true)` sends it once it
  // is counted, also when the peer is lost: it fails then. `go(false)`: it has been dropped. One of
  // them is called, once.
  using Go = base::UniqueFunction<void(bool)>;
  void wait(std::size_t bytes, const void* owner, Go go) STITCH_EXCLUDES(mutex_);
  // Drops the frames of `owner` that wait.
  void drop(const void* owner) noexcept STITCH_EXCLUDES(mutex_);
  void written(std::size_t bytes) noexcept STITCH_EXCLUDES(mutex_) {
    unwritten_.fetch_sub(bytes);
    if (waiting_.load() != 0) pump();
  }
  // Whether the frames that wait exceed the limit: who makes them should stop.
  [[nodiscard]] bool many() const noexcept {
    return waiting_bytes_.load(std::memory_order_relaxed) > limit_;
  }
  // The peer is lost, or this worker stops: all go, and fail.
  void give_up() noexcept STITCH_EXCLUDES(mutex_);

  [[nodiscard]] std::size_t unwritten_bytes() const noexcept { return unwritten_.load(); }
  [[nodiscard]] std::size_t waiting() const noexcept { return waiting_.load(); }
  [[nodiscard]] std::size_t waiting_bytes() const noexcept { return waiting_bytes_.load(); }

 private:
  struct QueuedFrame {
    std::size_t bytes;
    const void* owner;
    Go go;
  };
  [[nodiscard]] bool take(std::size_t bytes) noexcept;
  // One thread at a time, so that frames keep their order.
  void pump() noexcept STITCH_EXCLUDES(mutex_);

  const std::size_t limit_;
  std::atomic<std::size_t> unwritten_{0};      // bytes
  std::atomic<std::size_t> waiting_{0};        // of frames_, and the one in pump()
  std::atomic<std::size_t> waiting_bytes_{0};  // of frames_; written under mutex_

  base::Mutex mutex_;
  std::list<QueuedFrame> frames_ STITCH_GUARDED_BY(mutex_);
  bool pumping_ STITCH_GUARDED_BY(mutex_) = false;
  bool pump_again_ STITCH_GUARDED_BY(mutex_) = false;
  bool given_up_ STITCH_GUARDED_BY(mutex_) = false;
};

}  // namespace stitch::rpc
