#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "stitch/base/mutex.h"
#include "stitch/base/task_thread.h"
#include "stitch/base/unique_function.h"
#include "stitch/transport/gpu/cuda_api.h"
#include "stitch/transport/gpu/lane.h"
#include "stitch/transport/gpu/nccl_api.h"
#include "stitch/transport/gpu/path_choice.h"

namespace stitch::transport::gpu {

// The devices of this process for transfers: a Lane for each device, made by its first use, and the
// state that all workers share, since the order of launches is one order for a device. Owned by the
// workers of the process together; destroyed after them, not on a lane. Thread contract: any
// thread.
class Lanes {
 public:
  // The tables must outlive the lanes. `nccl` may be null; so may `streams`, the pool of this
  // process. Throws Error(invalid_argument) when CUDA cannot be used.
  Lanes(const CudaApi& cuda, const NcclApi* nccl, std::shared_ptr<StreamPool> streams = nullptr);
  // The lanes of this process over its libraries, shared by all that use them. Throws
  // Error(invalid_argument) without a CUDA that can be used.
  [[nodiscard]] static std::shared_ptr<Lanes> of_process();
  // Waits a bounded time for aborts of communicators.
  ~Lanes();
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  [[nodiscard]] int device_count() const noexcept { return static_cast<int>(uuids_.size()); }
  [[nodiscard]] const std::vector<std::array<char, 16>>& uuids() const noexcept { return uuids_; }
  [[nodiscard]] int nccl_version() const noexcept { return nccl_version_; }  // 0: there is none
  [[nodiscard]] const CudaApi& cuda() const noexcept { return cuda_; }
  [[nodiscard]] const NcclApi& nccl() const noexcept { return *nccl_; }
  // Throws Error(invalid_argument) for a missing device, Error(overloaded) when the system gives no
  // thread for it.
  [[nodiscard]] Lane& lane(int device);
  // Null when the system gives no thread. REQUIRES: the device is there; so do the others below.
  [[nodiscard]] Lane* find_lane(int device);
  // Whether a LaneLock holds the device.
  [[nodiscard]] bool held(int device) const;
  // Whether the device is lost to this process (Lane::failure).
  [[nodiscard]] bool lost(int device) const;
  // The thread of time limits. It makes no call that may wait for a device or for a peer.
  [[nodiscard]] base::TaskThread& connector() noexcept { return connector_; }
  [[nodiscard]] std::uint64_t new_pair() noexcept { return ++last_pair_; }

  // Calls `call`, which throws nothing and may hang, on a thread of its own with `device` current;
  // then `done` there, unless the lanes are gone by then. Returns false, and calls nothing, when
  // the system gives no thread.
  [[nodiscard]] bool run_apart(int device, base::UniqueFunction<void()> call,
                               base::UniqueFunction<void()> done);
  // The device goes without NCCL from now on, because an abort has hung.
  void quarantine(int device);
  [[nodiscard]] bool quarantined(int device) const;

  // The bytes of a transfer within this process, by the uid of the source's worker and the
  // transfer's id.
  struct LocalSource {
    int device = 0;
    const void* data = nullptr;
    std::size_t bytes = 0;
    std::shared_ptr<const void> owner;
    std::uint64_t key = 0;  // random; known to the destination alone
  };
  void offer(std::uint64_t uid, std::uint64_t id, LocalSource source);
  // Nothing with another key.
  [[nodiscard]] std::optional<LocalSource> take(std::uint64_t uid, std::uint64_t id,
                                                std::uint64_t key);
  void withdraw(std::uint64_t uid, std::uint64_t id);

  // Copies between two devices, which need a test that has copied bytes right. peer_failed() begins
  // a pause, and returns false for another failure of the same time.
  [[nodiscard]] PathState peer_state(int source, int destination) const;
  void set_peer_state(int source, int destination, PathState state);
  bool peer_failed(int source, int destination, std::chrono::nanoseconds first_pause);
  void peer_worked(int source, int destination);
  [[nodiscard]] std::size_t paused_peers() const;

 private:
  const CudaApi& cuda_;
  const NcclApi* const nccl_;
  const std::shared_ptr<StreamPool> streams_;  // used by the lanes
  std::vector<std::array<char, 16>> uuids_;
  int nccl_version_ = 0;
  std::atomic<std::uint64_t> last_pair_{0};

  mutable base::Mutex mutex_;
  std::map<std::pair<std::uint64_t, std::uint64_t>, LocalSource> offers_ STITCH_GUARDED_BY(mutex_);
  struct PeerPath {
    PathState state = PathState::untried;
    PathPause pause;
  };
  std::map<std::pair<int, int>, PeerPath> peer_paths_ STITCH_GUARDED_BY(mutex_);
  std::vector<bool> quarantined_ STITCH_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Lane>> lanes_ STITCH_GUARDED_BY(mutex_);
  // Shared with the threads of run_apart(), which may outlive this.
  struct Apart {
    base::Mutex mutex;
    base::CondVar changed;
    std::size_t running STITCH_GUARDED_BY(mutex) = 0;
    bool abandoned STITCH_GUARDED_BY(mutex) = false;
  };
  const std::shared_ptr<Apart> apart_ = std::make_shared<Apart>();
  base::TaskThread connector_;
};

}  // namespace stitch::transport::gpu
