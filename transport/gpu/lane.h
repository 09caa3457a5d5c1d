#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"
#include "stitch/transport/gpu/cuda_api.h"
#include "stitch/transport/gpu/launch_order.h"
#include "stitch/transport/gpu/staging.h"

namespace stitch::transport::gpu {

// The streams of lanes that have ended, for later lanes of the same device. No stream is ever
// destroyed: an allocator that is stream-ordered (libtorch's, with expandable segments or
// cudaMallocAsync) names the stream when the program returns memory, or when the allocator returns
// its cache to the device. Lives as long as the libraries that made the streams. Thread contract:
// any thread.
class StreamPool {
 public:
  static constexpr std::size_t kStreams = 3;  // of a lane
  using Streams = std::array<cuda::Stream, kStreams>;

  // The streams of an ended lane of that device, if the pool has any.
  [[nodiscard]] std::optional<Streams> take(int device);
  // REQUIRES: all work on the streams has ended.
  void give_back(int device, const Streams& streams);

 private:
  base::Mutex mutex_;
  std::map<int, std::vector<Streams>> by_device_ STITCH_GUARDED_BY(mutex_);
};

// The thread of one device of this process: it makes all CUDA calls of transfers and all NCCL
// launches of the device, launches in the agreed order, and polls events. It never waits for an
// event, a peer or user code. Owned by Lanes.
//
// Thread contract: methods are in two groups: from any thread, and from tasks and watches only.
// Tasks, watches and launchers run under no lock and throw nothing.
class Lane {
 public:
  using Task = base::UniqueFunction<void()>;
  // Called again and again until it returns true.
  using Watch = base::UniqueFunction<bool()>;

  // `streams` must outlive the lane. Throws std::system_error when the system gives no thread.
  Lane(const CudaApi& cuda, int device, StreamPool& streams);
  // Ends the thread once all watches have ended; waits a bounded time for that.
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // --- from any thread ---
  [[nodiscard]] int device() const noexcept { return device_; }
  // Tasks run in the order of posting.
  void post(Task task);
  // The launches of NCCL, which run on this thread.
  [[nodiscard]] LaunchOrder& order() noexcept { return order_; }
  [[nodiscard]] const LaunchOrder& order() const noexcept { return order_; }
  // Whether the device is lost to this process (failure()).
  [[nodiscard]] bool is_lost() const noexcept { return lost_; }

  // --- from tasks and watches ---
  void watch(Watch watch);
  // The device counts as lost after so many failed calls in a row without an answer from it.
  static constexpr int kMaxFailures = 100;
  // The state of an event: kSuccess, kNotReady or an error. The thread's last error is cleared.
  [[nodiscard]] cuda::Status query(cuda::Event event);
  // Calls `then` with kSuccess once the host has seen the end of all work on `stream` so far, or
  // with an error once the device is lost: no other error says that the work does not go on.
  void when_done(cuda::Stream stream, base::UniqueFunction<void(cuda::Status)> then);
  // The Error of a failed call: `what` has failed on this device. Also calls find_failure().
  [[nodiscard]] Error error_of(cuda::Status status, const std::string& what);
  // Clears the thread's last error, and asks the device whether it is lost to this process.
  // REQUIRES: the device is the thread's current one.
  void find_failure();
  // The reason why the device is lost to this process.
  [[nodiscard]] const std::optional<Error>& failure() const noexcept { return failure_; }
  [[nodiscard]] cuda::Stream copies_in() const noexcept { return streams_[0]; }
  [[nodiscard]] cuda::Stream copies_out() const noexcept { return streams_[1]; }
  // All launches of NCCL: the agreed order is the order of this stream.
  [[nodiscard]] cuda::Stream nccl() const noexcept { return streams_[2]; }
  // kSinkBytes of device memory for received bytes without a destination, allocated by the first
  // call. Null when the device has no memory for it.
  static constexpr std::size_t kSinkBytes = std::size_t{64} << 20;
  [[nodiscard]] void* sink();
  [[nodiscard]] StagingRing& outgoing() noexcept { return outgoing_; }
  [[nodiscard]] StagingRing& incoming() noexcept { return incoming_; }

 private:
  using Clock = std::chrono::steady_clock;
  // The work that a when_done() waits for, and the event that marks its end.
  struct Mark {
    cuda::Stream stream = nullptr;
    cuda::Event event = nullptr;
    bool recorded = false;
    int failures = 0;  // of calls, while the device seems to live
  };
  void run() noexcept;
  void set_up();
  void tear_down();
  void drop_tasks();
  bool run_tasks();
  bool poll();
  bool launch();
  void wait_for_work(Clock::time_point last_progress, std::chrono::nanoseconds& back_off);
  void wake();
  void record(Mark& mark);
  // The outcome of the marked work; none while it runs.
  [[nodiscard]] std::optional<cuda::Status> check(Mark& mark);
  void lost(cuda::Status status);

  const CudaApi& cuda_;
  const int device_;
  StreamPool& stream_pool_;
  LaunchOrder order_;

  base::Mutex mutex_;  // after the lock of order_
  base::CondVar changed_;
  std::vector<Task> tasks_ STITCH_GUARDED_BY(mutex_);
  bool order_changed_ STITCH_GUARDED_BY(mutex_) = false;
  bool stopping_ STITCH_GUARDED_BY(mutex_) = false;

  // Of the lane's thread.
  StreamPool::Streams streams_{};
  std::vector<cuda::Event> free_events_;
  std::vector<Watch> watches_;
  Watch issuing_;  // of the launch that NCCL has not queued yet
  std::optional<Error> failure_;
  std::atomic<bool> lost_{false};  // of any thread
  void* sink_ = nullptr;
  StagingRing outgoing_;
  StagingRing incoming_;

  std::thread thread_;  // last: it uses everything above
};

}  // namespace stitch::transport::gpu
