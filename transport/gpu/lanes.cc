#include "stitch/transport/gpu/lanes.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/base/error.h"
#include "stitch/base/signals.h"
#include "stitch/transport/gpu/gpu_libraries.h"
#include "stitch/transport/gpu/lane_lock.h"

namespace stitch::transport::gpu {
namespace {

constexpr std::chrono::seconds kAbortsTimeout(10);

}  // namespace

Lanes::Lanes(const CudaApi& cuda, const NcclApi* nccl, std::shared_ptr<StreamPool> streams)
    : cuda_(cuda),
      nccl_(nccl),
      streams_(streams != nullptr ? std::move(streams) : std::make_shared<StreamPool>()) {
  int count = 0;
  const cuda::Status status = cuda_.get_device_count(&count);
  if (status != cuda::kSuccess) {
    (void)cuda_.get_last_error();
    throw Error(ErrorCode::invalid_argument,
                std::string("CUDA cannot be used: ") + cuda_.get_error_string(status));
  }
  uuids_.resize(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    cuda::Uuid uuid{};
    if (cuda_.device_get_uuid(&uuid, i) != 0)
      throw Error(ErrorCode::invalid_argument, "device " + std::to_string(i) + " has no UUID");
    std::memcpy(uuids_[static_cast<std::size_t>(i)].data(), uuid.bytes, sizeof(uuid.bytes));
  }
  const base::MutexLock lock(mutex_);
  quarantined_.resize(uuids_.size());
  lanes_.resize(uuids_.size());
  if (nccl_ != nullptr && nccl_->get_version(&nccl_version_) != nccl::kSuccess) nccl_version_ = 0;
}

std::shared_ptr<Lanes> Lanes::of_process() {
  static base::Mutex mutex;
  static std::weak_ptr<Lanes> lanes;
  const base::MutexLock lock(mutex);
  auto shared = lanes.lock();
  if (shared == nullptr) {
    const GpuLibraries& libraries = GpuLibraries::of_process();
    if (libraries.cuda() == nullptr)
      throw Error(ErrorCode::invalid_argument, "CUDA cannot be used: " + libraries.why_no_cuda());
    shared = std::make_shared<Lanes>(*libraries.cuda(), libraries.nccl(), libraries.streams());
    lanes = shared;
  }
  return shared;
}

Lanes::~Lanes() {
  connector_.join();
  const auto deadline = base::deadline_after(kAbortsTimeout);
  base::MutexLock lock(apart_->mutex);
  while (apart_->running > 0 && apart_->changed.wait_until(apart_->mutex, deadline)) {
  }
  apart_->abandoned = true;
}

Lane& Lanes::lane(int device) {
  if (device < 0 || device >= device_count()) {
    throw Error(ErrorCode::invalid_argument, "device " + std::to_string(device) +
                                                 " is not there, this process has " +
                                                 std::to_string(device_count()));
  }
  Lane* const lane = find_lane(device);
  if (lane != nullptr) return *lane;
  throw Error(ErrorCode::overloaded,
              "the system gives no thread for device " + std::to_string(device));
}

Lane* Lanes::find_lane(int device) {
  const base::MutexLock lock(mutex_);
  auto& lane = lanes_.at(static_cast<std::size_t>(device));
  try {
    if (lane == nullptr) lane = std::make_unique<Lane>(cuda_, device, *streams_);
  } catch (const std::system_error&) {
    return nullptr;
  }
  return lane.get();
}

bool Lanes::lost(int device) const {
  const base::MutexLock lock(mutex_);
  const auto& lane = lanes_.at(static_cast<std::size_t>(device));
  return lane != nullptr && lane->is_lost();
}

bool Lanes::held(int device) const {
  const base::MutexLock lock(mutex_);
  const auto& lane = lanes_.at(static_cast<std::size_t>(device));
  return lane != nullptr && lane->order().held();
}

bool Lanes::run_apart(int device, base::UniqueFunction<void()> call,
                      base::UniqueFunction<void()> done) {
  {
    const base::MutexLock lock(apart_->mutex);
    ++apart_->running;
  }
  auto run = [apart = apart_, cuda = &cuda_, device, call = std::move(call),
              done = std::move(done)]() mutable {
    (void)begin_own_thread(*cuda, device);
    call();
    base::MutexLock lock(apart->mutex);
    // While this counts as running, the lanes that these refer to are there.
    if (!apart->abandoned) {
      lock.unlock();
      done();
      done = nullptr;
      call = nullptr;
      lock.lock();
    } else {  // leaked: their owners need the lanes
      new std::pair(std::move(call), std::move(done));
    }
    --apart->running;
    apart->changed.notify_all();
  };
  try {
    const base::SignalsBlocked blocked;
    std::thread(std::move(run)).detach();
    return true;
  } catch (const std::system_error&) {
    const base::MutexLock lock(apart_->mutex);
    --apart_->running;
    apart_->changed.notify_all();
    return false;
  }
}

void Lanes::quarantine(int device) {
  const base::MutexLock lock(mutex_);
  quarantined_.at(static_cast<std::size_t>(device)) = true;
}

bool Lanes::quarantined(int device) const {
  const base::MutexLock lock(mutex_);
  return quarantined_.at(static_cast<std::size_t>(device));
}

void Lanes::offer(std::uint64_t uid, std::uint64_t id, LocalSource source) {
  const base::MutexLock lock(mutex_);
  offers_.insert_or_assign({uid, id}, std::move(source));
}

std::optional<Lanes::LocalSource> Lanes::take(std::uint64_t uid, std::uint64_t id,
                                              std::uint64_t key) {
  const base::MutexLock lock(mutex_);
  const auto at = offers_.find({uid, id});
  if (at == offers_.end() || at->second.key != key) return std::nullopt;
  LocalSource source = std::move(at->second);
  offers_.erase(at);
  return source;
}

void Lanes::withdraw(std::uint64_t uid, std::uint64_t id) {
  LocalSource unused;  // its owner ends without the lock
  const base::MutexLock lock(mutex_);
  const auto at = offers_.find({uid, id});
  if (at == offers_.end()) return;
  unused = std::move(at->second);
  offers_.erase(at);
}

PathState Lanes::peer_state(int source, int destination) const {
  const base::MutexLock lock(mutex_);
  const auto at = peer_paths_.find({source, destination});
  if (at == peer_paths_.end()) return PathState::untried;
  const auto& [state, pause] = at->second;
  return state == PathState::closed && pause.over() ? PathState::untried : state;
}

void Lanes::set_peer_state(int source, int destination, PathState state) {
  const base::MutexLock lock(mutex_);
  peer_paths_[{source, destination}].state = state;
}

bool Lanes::peer_failed(int source, int destination, std::chrono::nanoseconds first_pause) {
  const base::MutexLock lock(mutex_);
  PeerPath& path = peer_paths_[{source, destination}];
  if (path.state == PathState::closed) return false;
  path.state = PathState::closed;
  path.pause.failure(first_pause);
  return true;
}

void Lanes::peer_worked(int source, int destination) {
  const base::MutexLock lock(mutex_);
  peer_paths_[{source, destination}].pause.success();
}

std::size_t Lanes::paused_peers() const {
  const base::MutexLock lock(mutex_);
  return static_cast<std::size_t>(
      std::count_if(peer_paths_.begin(), peer_paths_.end(), [](const auto& at) {
        return at.second.state == PathState::closed && !at.second.pause.over();
      }));
}

}  // namespace stitch::transport::gpu

namespace stitch::gpu {

LaneLock::LaneLock(const std::shared_ptr<transport::gpu::Lanes>& lanes, int device,
                   std::chrono::nanoseconds timeout) {
  transport::gpu::LaunchOrder& order = lanes->lane(device).order();
  if (!order.acquire(base::deadline_after(timeout))) {
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count();
    throw Error(ErrorCode::timeout, "device " + std::to_string(device) +
                                        " still runs transfers by NCCL after " +
                                        std::to_string(waited) + " ms; it is not locked");
  }
  lock_ = std::shared_ptr<void>(&order, [lanes, &order](void*) { order.release(); });
}

LaneLock lane_lock(int device, std::chrono::nanoseconds timeout) {
  return {transport::gpu::Lanes::of_process(), device, timeout};
}

}  // namespace stitch::gpu
