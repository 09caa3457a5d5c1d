#pragma once

#include <chrono>
#include <memory>

namespace stitch::transport::gpu {
class Lanes;
}  // namespace stitch::transport::gpu

namespace stitch::gpu {

// While it exists, stitch runs no NCCL on one device of this process: for other users of NCCL, such
// as c10d's process groups, whose kernels wait for other processes as stitch's do. What stitch has
// to move meanwhile goes through pinned memory; communicators stay open. Every process of a
// collective takes one on its device before it launches the collective, and keeps it until the host
// has seen the collective's end. Then neither waits for the other, whatever order they were called
// in (transport/gpu/PROTOCOL.md, section 5); without it a collective and a transfer may wait for
// each other, until the transfer counts as stalled, its communicator is aborted, and it goes
// through pinned memory (a minute). Several may exist for one device. A value that is moved. Thread
// contract: one thread at a time; any thread may destroy it but one that runs a callback of stitch.
class LaneLock {
 public:
  LaneLock() = default;  // holds nothing
  // What lane_lock() does, for the devices of these lanes.
  LaneLock(std::shared_ptr<transport::gpu::Lanes> lanes, int device,
           std::chrono::nanoseconds timeout);
  ~LaneLock() { unlock(); }
  LaneLock(LaneLock&& other) noexcept;
  // Unlocks what it holds, and takes over what `other` holds.
  LaneLock& operator=(LaneLock&& other) noexcept;
  LaneLock(const LaneLock&) = delete;
  LaneLock& operator=(const LaneLock&) = delete;

  // Lets transfers run NCCL again.
  void unlock() noexcept;

 private:
  std::shared_ptr<transport::gpu::Lanes> lanes_;  // null: it holds nothing
  int device_ = 0;
};

// Holds that CUDA device of this process once what stitch runs on it by NCCL has ended. Throws
// Error(timeout) when that does not come in time, Error(invalid_argument) where CUDA cannot be used
// or the device is not there. Blocks; not for inline functions, on_ready and other callbacks.
[[nodiscard]] LaneLock lane_lock(int device,
                                 std::chrono::nanoseconds timeout = std::chrono::seconds(60));

}  // namespace stitch::gpu
