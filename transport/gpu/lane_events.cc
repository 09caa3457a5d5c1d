// How a lane sees that work on its device has ended, or that the device is lost.

#include <string>
#include <utility>

#include "stitch/transport/gpu/lane.h"

namespace stitch::transport::gpu {
namespace {

// cudaErrorStreamCapture...: a capture forbids the call, for as long as it lasts.
bool is_of_capture(cuda::Status status) {
  constexpr int kFirst = 900;
  constexpr int kLast = 908;
  return static_cast<int>(status) >= kFirst && static_cast<int>(status) <= kLast;
}

}  // namespace

cuda::Status Lane::query(cuda::Event event) {
  const cuda::Status status = cuda_.event_query(event);
  // Also of kNotReady the runtime makes a note, which the next to look takes for an error of its
  // own.
  if (status != cuda::kSuccess) (void)cuda_.get_last_error();
  return status;
}

void Lane::when_done(cuda::Stream stream, base::UniqueFunction<void(cuda::Status)> then) {
  Mark mark{stream};
  record(mark);
  watch([this, mark, then = std::move(then)]() mutable {
    const std::optional<cuda::Status> status = look_at(mark);
    if (!status) return false;
    if (mark.event != nullptr) free_events_.push_back(mark.event);
    then(*status);
    return true;
  });
}

void Lane::record(Mark& mark) {
  cuda::Status status = cuda::kSuccess;
  if (mark.event == nullptr && !free_events_.empty()) {
    mark.event = free_events_.back();
    free_events_.pop_back();
  }
  if (mark.event == nullptr)
    status = cuda_.event_create_with_flags(&mark.event, cuda::kEventDisableTiming);
  if (status == cuda::kSuccess) status = cuda_.event_record(mark.event, mark.stream);
  mark.recorded = status == cuda::kSuccess;
  if (!mark.recorded) find_failure();
}

// A call that fails says nothing of the work, which may still read and write memory: that is given
// back only when the work is seen to have ended, if need be by another call.
std::optional<cuda::Status> Lane::look_at(Mark& mark) {
  if (mark.recorded) {
    const cuda::Status status = query(mark.event);
    if (status == cuda::kSuccess) return status;
    if (status == cuda::kNotReady) return std::nullopt;
    mark.recorded = false;
  }
  find_failure();
  if (failure_) return cuda::kLaunchFailure;
  const cuda::Status status = cuda_.stream_query(mark.stream);
  if (status == cuda::kSuccess) return status;
  (void)cuda_.get_last_error();
  record(mark);  // later than before: it covers more, and not less
  if (status == cuda::kNotReady || is_of_capture(status) || mark.recorded) return std::nullopt;
  if (++mark.failures < kMaxFailures) return std::nullopt;
  lost(status);
  return status;
}

Error Lane::error_of(cuda::Status status, const std::string& what) {
  find_failure();
  return Error(status == cuda::kOutOfMemory ? ErrorCode::overloaded : ErrorCode::internal,
               "device " + std::to_string(device_) + ": " + what + ": " +
                   cuda_.get_error_name(status) + ", " + cuda_.get_error_string(status));
}

// What the runtime notes for a thread says nothing of the device: a call to the driver does.
void Lane::find_failure() {
  (void)cuda_.get_last_error();
  if (failure_ || streams_[0] == nullptr) return;
  const cuda::Status status = cuda_.stream_query(streams_[0]);
  if (status == cuda::kSuccess) return;
  (void)cuda_.get_last_error();
  if (status != cuda::kNotReady && !is_of_capture(status)) lost(status);
}

void Lane::lost(cuda::Status status) {
  failure_.emplace(ErrorCode::internal, "device " + std::to_string(device_) +
                                            " is lost to this process until it is restarted: " +
                                            cuda_.get_error_name(status) + ", " +
                                            cuda_.get_error_string(status));
  lost_ = true;
}

}  // namespace stitch::transport::gpu
