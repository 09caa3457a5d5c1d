#pragma once

#include <chrono>
#include <memory>

namespace stitch::transport::gpu {
class Lanes;
}  // namespace stitch::transport::gpu

namespace stitch::gpu {

// Keeps stitch from running NCCL on one device of this process: for other users of NCCL, such as
// c10d's process groups, whose kernels wait for other processes as stitch's do. Transfers go
// through pinned memory meanwhile; communicators stay open. Every process of a collective acquires
// the lock of its device before it launches the collective, and keeps it until the host has seen
// the collective's end; then neither waits for the other (transport/gpu/PROTOCOL.md, section 5).
// Without the lock, a collective and a transfer may wait for each other for a minute, until the
// transfer counts as stalled and goes through pinned memory. Several locks may exist for one
// device. A value that is moved. Thread contract: one thread at a time; any thread may destroy it
// but a thread that runs a callback of stitch.
class LaneLock {
 public:
  LaneLock() = default;  // holds nothing
  // As lane_lock(), for the devices of these lanes.
  LaneLock(const std::shared_ptr<transport::gpu::Lanes>& lanes, int device,
           std::chrono::nanoseconds timeout);
  LaneLock(LaneLock&& other) noexcept = default;
  // Unlocks the device that it holds, and takes over the device of `other`.
  LaneLock& operator=(LaneLock&& other) noexcept = default;

  // Lets transfers run NCCL again.
  void unlock() noexcept { lock_.reset(); }

 private:
  std::shared_ptr<void> lock_;  // its end unlocks the device
};

// Acquires the lock of that CUDA device of this process once all that stitch runs there by NCCL has
// ended. Throws Error(timeout) when that does not come in time, Error(invalid_argument) without
// CUDA or without the device. Blocks; not for inline functions, on_ready and other callbacks.
[[nodiscard]] LaneLock lane_lock(int device,
                                 std::chrono::nanoseconds timeout = std::chrono::seconds(60));

}  // namespace stitch::gpu
