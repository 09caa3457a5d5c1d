#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/base/mutex.h"
#include "stitch/base/unique_function.h"
#include "stitch/transport/gpu/cuda_api.h"
#include "stitch/transport/gpu/kept_streams.h"
#include "stitch/transport/gpu/staging_ring.h"
#include "stitch/transport/gpu/transfer_order.h"

namespace stitch::transport::gpu {

// What all transfers of one device of this process run on: a thread that makes all CUDA calls of
// transfers and all NCCL launches of the device, these in the agreed order, and that polls events.
// It never waits for an event, a peer or user code. Owned by Lanes.
//
// Thread contract: methods are in two groups: from any thread, and from tasks and watches only. The
// order is guarded by a lock of the lane, which is never held while callbacks run. Tasks, watches
// and launchers throw nothing.
class Lane {
 public:
  using Task = base::UniqueFunction<void()>;
  // Called again and again until it returns true.
  using Watch = base::UniqueFunction<bool()>;
  // Where a transfer has come to in the order: its clock value, or nothing where it has none. Then
  // `held` says whether that is because the device is held.
  struct Entered {
    std::optional<std::uint64_t> clock{};
    bool held = false;
  };
  // Launches a transfer. What it returns, if anything, is called like a watch, and nothing else is
  // launched before that returns true.
  using Launcher = std::function<Watch(std::uint64_t number)>;

  // `streams` must outlive it. Throws std::system_error when the system gives no thread.
  Lane(const CudaApi& cuda, int device, KeptStreams& streams);
  // Ends the thread, once what is watched has happened; waits a bounded time for that.
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // --- from any thread ---
  [[nodiscard]] int device() const noexcept { return device_; }
  // Tasks run in the order of posting.
  void post(Task task);
  // As TransferOrder has them.
  void add_pair(TransferOrder::Pair pair, TransferOrder::End end, std::uint64_t source,
                Launcher launcher);
  std::vector<std::uint64_t> drop_pair(TransferOrder::Pair pair);
  [[nodiscard]] Entered announce(TransferOrder::Pair pair, std::uint64_t number);
  [[nodiscard]] Entered accept(TransferOrder::Pair pair, std::uint64_t number, std::uint64_t clock);
  bool agree(TransferOrder::Pair pair, std::uint64_t number, std::uint64_t clock);
  bool withdraw(TransferOrder::Pair pair, std::uint64_t number);
  void finish(TransferOrder::Pair pair);
  [[nodiscard]] std::vector<TransferOrder::Pair> overdue(std::chrono::nanoseconds age) const;
  // Transfers in the order that are not launched, and those launched and not finished.
  [[nodiscard]] std::size_t pending() const;
  [[nodiscard]] std::size_t launched() const;
  // For how long nothing that was launched has ended, or was told to: 0 where nothing is launched.
  // All of it is on one stream, in one order for all workers of the process.
  [[nodiscard]] std::chrono::nanoseconds standing_still() const;

  // Keeps transfers from running NCCL on the device: announce() and accept() enter nothing until
  // release(). Waits until nothing is in the order and nothing launched is unfinished; false, and
  // not held, when that has not come by `deadline`. Counted. Must not be called by callbacks.
  [[nodiscard]] bool hold(std::chrono::steady_clock::time_point deadline);
  void release();
  [[nodiscard]] bool held() const;
  // As failure() has it.
  [[nodiscard]] bool is_lost() const noexcept { return lost_; }

  // --- from tasks and watches ---
  void watch(Watch watch);
  // Calls that fail one after another without a word from the device: then it counts as lost.
  static constexpr int kMaxFailures = 100;
  // Whether it has happened: kNotReady, or what went wrong. Leaves no error for others to find.
  [[nodiscard]] cuda::Status query(cuda::Event event);
  // Calls `then` when the host has seen that all work on `stream` so far is done, with kSuccess; or
  // with an error, once the device is lost: nothing else says that the work does not go on.
  void when_done(cuda::Stream stream, base::UniqueFunction<void(cuda::Status)> then);
  // An Error that says which call on this device failed. As find_failure() besides.
  [[nodiscard]] Error error_of(cuda::Status status, const std::string& what);
  // Clears what the thread has noted of a call that failed, and asks the device whether it is lost
  // to this process: then failure() says so. REQUIRES: it is the thread's current device.
  void find_failure();
  // Why this device cannot be used any more.
  [[nodiscard]] const std::optional<Error>& failure() const noexcept { return failure_; }
  [[nodiscard]] cuda::Stream copies_in() const noexcept { return streams_[0]; }
  [[nodiscard]] cuda::Stream copies_out() const noexcept { return streams_[1]; }
  // All launches of NCCL: the agreed order is the order of this stream.
  [[nodiscard]] cuda::Stream nccl() const noexcept { return streams_[2]; }
  // Memory of kSinkBytes that receives what has no place to go; allocated when first asked for.
  // Null when there is none.
  static constexpr std::size_t kSinkBytes = std::size_t{64} << 20;
  [[nodiscard]] void* sink();
  [[nodiscard]] StagingRing& outgoing() noexcept { return outgoing_; }
  [[nodiscard]] StagingRing& incoming() noexcept { return incoming_; }

 private:
  using Clock = std::chrono::steady_clock;
  void run() noexcept;
  void set_up();
  void tear_down();
  void drop_tasks();
  bool run_tasks();
  bool poll();
  // A watch of when_done(): what it waits for, and with which event.
  struct Mark {
    cuda::Stream stream = nullptr;
    cuda::Event event = nullptr;
    bool recorded = false;
    int failures = 0;  // of calls, while the device seems to live
  };
  void record(Mark& mark);
  // Nothing: not yet.
  [[nodiscard]] std::optional<cuda::Status> look_at(Mark& mark);
  void lost(cuda::Status status);
  bool launch();
  void wait_for_work(Clock::time_point last_progress, std::chrono::nanoseconds& back_off);

  const CudaApi& cuda_;
  const int device_;
  KeptStreams& kept_streams_;

  mutable base::Mutex mutex_;
  base::CondVar changed_;
  std::vector<Task> tasks_ STITCH_GUARDED_BY(mutex_);
  TransferOrder order_ STITCH_GUARDED_BY(mutex_);
  std::map<TransferOrder::Pair, Launcher> launchers_ STITCH_GUARDED_BY(mutex_);
  bool order_changed_ STITCH_GUARDED_BY(mutex_) = false;
  bool stopping_ STITCH_GUARDED_BY(mutex_) = false;
  int holders_ STITCH_GUARDED_BY(mutex_) = 0;
  Clock::time_point moved_ STITCH_GUARDED_BY(mutex_){};  // when a launch began or ended last
  base::CondVar idle_;                                   // what holders wait for may have come

  // Of the lane's thread.
  KeptStreams::Streams streams_{};
  std::vector<cuda::Event> free_events_;
  std::vector<Watch> watches_;
  Watch issuing_;
  std::optional<Error> failure_;
  std::atomic<bool> lost_{false};  // of any thread
  void* sink_ = nullptr;
  StagingRing outgoing_;
  StagingRing incoming_;

  std::thread thread_;  // last: it uses everything above
};

}  // namespace stitch::transport::gpu
