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
#include "stitch/transport/gpu/kept_streams.h"
#include "stitch/transport/gpu/lane.h"
#include "stitch/transport/gpu/nccl_api.h"
#include "stitch/transport/gpu/path_choice.h"

namespace stitch::transport::gpu {

// The devices of this process, as transfers use them: a Lane for each, made when first used, and
// what its workers share. All workers of a process must share one, since the order of launches is
// one order for a device. Owned by them together; destroyed after them, not on a lane.
// Thread contract: any thread.
class Lanes {
 public:
  // The tables must outlive it. `nccl` may be null. `streams`: those that lanes of this process
  // have left behind; null: none. Throws Error(invalid_argument) when CUDA says that it cannot be
  // used.
  Lanes(const CudaApi& cuda, const NcclApi* nccl, std::shared_ptr<KeptStreams> streams = nullptr);
  // Those of this process, over its libraries, while anything refers to them. Throws
  // Error(invalid_argument) where CUDA is not there or cannot be used.
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
  // Throws Error(invalid_argument) for a device that is not there, Error(overloaded) when the
  // system gives no thread for it.
  [[nodiscard]] Lane& lane(int device);
  // The same; null when the system gives no thread. For a device that is there.
  [[nodiscard]] Lane* find_lane(int device);
  // Whether other users of NCCL hold it (Lane::hold). For a device that is there.
  [[nodiscard]] bool held(int device) const;
  // Whether it cannot be used any more by this process (Lane::failure).
  [[nodiscard]] bool lost(int device) const;
  // Where time limits are, and what waits for them. It makes no call that may wait for a device or
  // for a peer: nothing would notice that one does.
  [[nodiscard]] base::TaskThread& connector() noexcept { return connector_; }
  [[nodiscard]] std::uint64_t new_pair() noexcept { return ++last_pair_; }

  // Calls `call` on a thread of its own, which may hang, with `device` as its current one; then
  // `done` there. False, and nothing is done, when the system gives no thread. `call` throws
  // nothing and may run longer than there is this; then `done` is not called.
  [[nodiscard]] bool run_apart(int device, base::UniqueFunction<void()> call,
                               base::UniqueFunction<void()> done);
  // Aborts a communicator so. REQUIRES: no other thread uses the communicator.
  [[nodiscard]] bool abort(nccl::Comm comm, int device, base::UniqueFunction<void()> done);
  // A device whose aborts hang is not used with NCCL any more.
  void quarantine(int device);
  [[nodiscard]] bool quarantined(int device) const;

  // Bytes that a transfer within this process will copy, by the uid of the source's worker and the
  // number of the transfer.
  struct LocalSource {
    int device = 0;
    const void* data = nullptr;
    std::size_t bytes = 0;
    std::shared_ptr<const void> owner;
    std::uint64_t key = 0;  // random; only the transfer's destination is told
  };
  void offer(std::uint64_t uid, std::uint64_t id, LocalSource source);
  // Null, and nothing is taken, with another key.
  [[nodiscard]] std::optional<LocalSource> take(std::uint64_t uid, std::uint64_t id,
                                                std::uint64_t key);
  void withdraw(std::uint64_t uid, std::uint64_t id);

  // Copies between two devices: used once a test has copied bytes right. After peer_failed() they
  // are not used until a pause is over, and then tested again. It returns false, and has changed
  // nothing, for what others of the same time have said already.
  [[nodiscard]] PathState peer_state(int source, int destination) const;
  void set_peer_state(int source, int destination, PathState state);
  bool peer_failed(int source, int destination, std::chrono::nanoseconds first_pause);
  void peer_worked(int source, int destination);
  [[nodiscard]] std::size_t paused_peers() const;

 private:
  const CudaApi& cuda_;
  const NcclApi* const nccl_;
  const std::shared_ptr<KeptStreams> streams_;  // lanes refer to it
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
