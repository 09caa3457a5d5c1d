#include "stitch/transport/gpu/lane_lock.h"

#include <string>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/base/error.h"
#include "stitch/transport/gpu/lane.h"
#include "stitch/transport/gpu/lanes.h"

namespace stitch::gpu {

LaneLock::LaneLock(std::shared_ptr<transport::gpu::Lanes> lanes, int device,
                   std::chrono::nanoseconds timeout)
    : device_(device) {
  if (!lanes->lane(device).hold(base::deadline_after(timeout))) {
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count();
    throw Error(ErrorCode::timeout, "device " + std::to_string(device) +
                                        " still runs transfers by NCCL after " +
                                        std::to_string(waited) + " ms; it is not locked");
  }
  lanes_ = std::move(lanes);
}

LaneLock::LaneLock(LaneLock&& other) noexcept
    : lanes_(std::exchange(other.lanes_, nullptr)), device_(other.device_) {}

LaneLock& LaneLock::operator=(LaneLock&& other) noexcept {
  if (this != &other) {
    unlock();
    lanes_ = std::exchange(other.lanes_, nullptr);
    device_ = other.device_;
  }
  return *this;
}

void LaneLock::unlock() noexcept {
  if (lanes_ == nullptr) return;
  lanes_->lane(device_).release();
  lanes_.reset();
}

LaneLock lane_lock(int device, std::chrono::nanoseconds timeout) {
  return {transport::gpu::Lanes::of_process(), device, timeout};
}

}  // namespace stitch::gpu
