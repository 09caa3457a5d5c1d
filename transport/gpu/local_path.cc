// Between workers of one process: one copy, on the lane of the destination. The frames are the same
// as between processes, but no address is in them: the source offers its memory in Lanes.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <utility>

#include "stitch/transport/gpu/device_transfers_impl.h"

namespace stitch::transport::gpu {
namespace {

// Copies of a pattern from device to device and back to the host. Broken peer-to-peer hardware
// (misconfigured IOMMU) reports success and copies garbage.
class PeerCopyTest {
 public:
  static constexpr std::size_t kBytes = 65536;

  // `at_source`: so many bytes of the source.
  PeerCopyTest(const CudaApi& cuda, int source, void* at_source, int destination)
      : cuda_(cuda), source_(source), destination_(destination), at_source_(at_source) {}
  ~PeerCopyTest() {
    if (at_destination_ != nullptr) (void)cuda_.free(at_destination_);
    if (host_ != nullptr) (void)cuda_.free_host(host_);
  }
  PeerCopyTest(const PeerCopyTest&) = delete;
  PeerCopyTest& operator=(const PeerCopyTest&) = delete;

  // On the destination's lane.
  cuda::Status start(cuda::Stream stream) {
    int can = 0;
    cuda::Status status = cuda_.device_can_access_peer(&can, destination_, source_);
    if (status == cuda::kSuccess && can != 0) {
      status = cuda_.device_enable_peer_access(source_, 0);
      if (status == cuda::kPeerAccessAlreadyEnabled) {
        (void)cuda_.get_last_error();
        status = cuda::kSuccess;
      }
    }
    if (status == cuda::kSuccess) status = cuda_.malloc(&at_destination_, kBytes);
    void* host = nullptr;
    if (status == cuda::kSuccess) {
      status = cuda_.host_alloc(&host, 2 * kBytes, cuda::kHostAllocPortable);
    }
    if (status != cuda::kSuccess) return status;
    host_ = static_cast<unsigned char*>(host);
    for (std::size_t i = 0; i < kBytes; ++i) {
      host_[i] = static_cast<unsigned char>(i * 7 + i / 251);
      host_[kBytes + i] = 0;
    }
    status = cuda_.memcpy_async(at_destination_, host_, kBytes, cuda::kHostToDevice, stream);
    if (status == cuda::kSuccess) {
      status = cuda_.memcpy_peer_async(at_source_, source_, at_destination_, destination_, kBytes,
                                       stream);
    }
    if (status == cuda::kSuccess) {
      status = cuda_.memset_async(at_destination_, 0, kBytes, stream);
    }
    if (status == cuda::kSuccess) {
      status = cuda_.memcpy_peer_async(at_destination_, destination_, at_source_, source_, kBytes,
                                       stream);
    }
    if (status == cuda::kSuccess) {
      status =
          cuda_.memcpy_async(host_ + kBytes, at_destination_, kBytes, cuda::kDeviceToHost, stream);
    }
    return status;
  }
  [[nodiscard]] bool passed() const { return std::memcmp(host_, host_ + kBytes, kBytes) == 0; }

 private:
  const CudaApi& cuda_;
  const int source_;
  const int destination_;
  void* const at_source_;
  void* at_destination_ = nullptr;
  unsigned char* host_ = nullptr;
};

}  // namespace

bool DeviceTransfers::Impl::adopt(const IncomingPtr& transfer, const Lanes::LocalSource& source) {
  Adopt adopt;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->ended) return false;
    adopt = std::move(transfer->adopt);
  }
  const CallOut call(*this);
  (void)lanes_.cuda().get_last_error();  // as in allocate()
  return call && adopt && adopt(source.owner);
}

void DeviceTransfers::Impl::start_local(const IncomingPtr& transfer, std::uint64_t key) {
  std::uint64_t uid = uid_;
  if (transfer->from != options_.self) {
    const base::MutexLock lock(mutex_);
    const auto& hello = peers_[transfer->from].hello;
    uid = hello ? hello->uid : 0;
  }
  std::optional<Lanes::LocalSource> source = lanes_.take(uid, transfer->id, key);
  if (!source || source->bytes != transfer->bytes) return retry(transfer);
  Lane& lane = *transfer->lane;
  if (source->device == lane.device() && adopt(transfer, *source)) {
    return finish(transfer, std::nullopt);
  }
  if (!allocate(transfer, lane.copies_in())) return finish(transfer, transfer->no_memory);
  const CudaApi& cuda = lanes_.cuda();
  const cuda::Status status =
      source->device == lane.device()
          ? cuda.memcpy_async(transfer->memory.data, source->data, source->bytes,
                              cuda::kDeviceToDevice, lane.copies_in())
          : cuda.memcpy_peer_async(transfer->memory.data, lane.device(), source->data,
                                   source->device, source->bytes, lane.copies_in());
  // Copies between two devices that fail without an error of the device itself are not used for a
  // while.
  const auto failed = [self = shared_from_this(), transfer, &lane,
                       from = source->device](cuda::Status why) {
    const Error error = lane.error_of(why, "bytes cannot be copied to it");
    if (from == lane.device() || lane.failure()) return self->finish(transfer, error);
    self->peer_copies_failed(transfer->from, lane.device(), from, lane.device(), error.what());
    self->retry(transfer);
  };
  if (status != cuda::kSuccess) return failed(status);
  lane.when_done(lane.copies_in(),
                 on_lane(transfer, [self = shared_from_this(), transfer, failed,
                                    source = std::move(source)](cuda::Status done) {
                   if (done == cuda::kSuccess) return self->finish(transfer, std::nullopt);
                   failed(done);
                 }));
}

void DeviceTransfers::Impl::peer_copies_failed(PeerId peer, int device, int source, int destination,
                                               const char* why) {
  if (!lanes_.peer_failed(source, destination, options_.reopen_backoff)) return;
  const base::MutexLock lock(mutex_);
  path_failed(peer, device, Path::peer, why);
}

// Lane of the source. Its memory is allocated and freed there: on the destination's lane that could
// wait for the source's device, of whose order that lane knows nothing.
void DeviceTransfers::Impl::test_peer_copies(PeerId to, int source, int destination) {
  lanes_.set_peer_state(source, destination, PathState::opening);
  const CudaApi& cuda = lanes_.cuda();
  Lane& own = lanes_.lane(source);
  Lane& lane = lanes_.lane(destination);
  void* memory = nullptr;
  const cuda::Status allocated = cuda.malloc(&memory, PeerCopyTest::kBytes);
  if (allocated != cuda::kSuccess) {
    const Error why = own.error_of(allocated, "peer copies cannot be tested");
    return peer_copies_failed(to, source, source, destination, why.what());
  }
  const auto over = std::make_shared<std::atomic<bool>>(false);
  own.watch([&cuda, memory, over] {
    if (!over->load()) return false;
    (void)cuda.free(memory);
    return true;
  });
  // With what the destination's lane has of the test, whether that runs or is dropped.
  const std::shared_ptr<void> in_use(nullptr, [over](void*) { over->store(true); });
  lane.post([self = shared_from_this(), &lane, to, source, memory, destination, in_use] {
    auto test = std::make_shared<PeerCopyTest>(self->lanes_.cuda(), source, memory, destination);
    const cuda::Status started = test->start(lane.copies_in());
    std::string why;
    if (started != cuda::kSuccess)
      why = lane.error_of(started, "peer copies cannot be tested").what();
    lane.when_done(lane.copies_in(), [self, &lane, test, in_use, why, to, source,
                                      destination](cuda::Status done) {
      if (why.empty() && done == cuda::kSuccess && test->passed())
        return self->lanes_.set_peer_state(source, destination, PathState::open);
      if (!why.empty() || done == cuda::kSuccess) {
        return self->peer_copies_failed(to, source, source, destination,
                                        why.empty() ? "a test copied wrong bytes" : why.c_str());
      }
      const Error error = lane.error_of(done, "peer copies cannot be tested");
      self->peer_copies_failed(to, source, source, destination, error.what());
    });
  });
}

}  // namespace stitch::transport::gpu
