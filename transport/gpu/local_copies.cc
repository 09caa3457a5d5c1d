#include "stitch/transport/gpu/local_copies.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "stitch/transport/gpu/transfers.h"

namespace stitch::transport::gpu {
namespace {

// Copies of a pattern from device to device and back to the host. Broken peer-to-peer hardware
// (misconfigured IOMMU) reports success and copies garbage.
class PeerCopyTest {
 public:
  static constexpr std::size_t kBytes = 65536;

  // `at_source`, `at_destination`: so many bytes of each.
  PeerCopyTest(const CudaApi& cuda, int source, void* at_source, int destination,
               DeviceMemory at_destination)
      : cuda_(cuda),
        source_(source),
        destination_(destination),
        at_source_(at_source),
        memory_(std::move(at_destination)),
        at_destination_(memory_.data) {}
  ~PeerCopyTest() {
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
  const DeviceMemory memory_;
  void* const at_destination_;
  unsigned char* host_ = nullptr;
};

}  // namespace

void LocalCopies::start(const IncomingPtr& transfer, std::uint64_t key) {
  const auto hello = transfers_.hello_of(transfer->from);
  Lanes& lanes = transfers_.lanes();
  std::optional<Lanes::LocalSource> source =
      hello ? lanes.take(hello->uid, transfer->id, key) : std::nullopt;
  if (!source || source->bytes != transfer->bytes) return transfers_.retry(transfer);
  Lane& lane = *transfer->lane;
  if (source->device == lane.device() && transfers_.adopt(transfer, source->owner)) {
    return transfers_.finish(transfer, std::nullopt);
  }
  if (!transfers_.allocate(transfer, lane.copies_in()))
    return transfers_.finish(transfer, transfer->no_memory);
  const CudaApi& cuda = lanes.cuda();
  const cuda::Status status =
      source->device == lane.device()
          ? cuda.memcpy_async(transfer->memory.data, source->data, source->bytes,
                              cuda::kDeviceToDevice, lane.copies_in())
          : cuda.memcpy_peer_async(transfer->memory.data, lane.device(), source->data,
                                   source->device, source->bytes, lane.copies_in());
  // Copies between two devices that fail without an error of the device itself are not used for a
  // while.
  const auto not_copied = [this, transfer, &lane, from = source->device](cuda::Status why) {
    const Error error = lane.error_of(why, "bytes cannot be copied to it");
    if (from == lane.device() || lane.failure()) return transfers_.finish(transfer, error);
    failed(transfer->from, lane.device(), from, lane.device(), error.what());
    transfers_.retry(transfer);
  };
  if (status != cuda::kSuccess) return not_copied(status);
  lane.when_done(lane.copies_in(), [this, self = transfers_.shared_from_this(), transfer,
                                    not_copied, source = std::move(source)](cuda::Status done) {
    if (done == cuda::kSuccess) return transfers_.finish(transfer, std::nullopt);
    not_copied(done);
  });
}

void LocalCopies::failed(PeerId peer, int device, int source, int destination,
                         const std::string& why) {
  if (!transfers_.lanes().peer_failed(source, destination, transfers_.options().reopen_backoff))
    return;
  transfers_.report().failed(peer, device, Path::peer, why);
}

// The source's memory is allocated and freed on the source's lane: on the destination's that could
// wait for the source's device, of whose order that lane knows nothing.
void LocalCopies::test(PeerId to, int source, int destination) {
  Lanes& lanes = transfers_.lanes();
  lanes.set_peer_state(source, destination, PathState::opening);
  const auto cannot = [this, to, source, destination](const std::string& why) {
    failed(to, source, source, destination, why);
  };
  Lane& own = lanes.lane(source);
  Lane* const lane = lanes.find_lane(destination);
  if (lane == nullptr) return cannot("the system gives no thread for it");
  const auto allocated = std::make_shared<DeviceMemory>(memory_for_test(own));
  if (allocated->data == nullptr) return cannot("there is no memory to test it");
  const auto over = std::make_shared<std::atomic<bool>>(false);
  own.watch([allocated, over] { return over->load(); });
  // With the part of the test on the destination's lane, whether that runs or is dropped.
  const std::shared_ptr<void> in_use(nullptr, [over](void*) { over->store(true); });
  lane->post([this, self = transfers_.shared_from_this(), lane, source, destination, cannot,
              memory = allocated->data, in_use] {
    DeviceMemory there = memory_for_test(*lane);
    if (there.data == nullptr) return cannot("there is no memory to test it");
    const auto test = std::make_shared<PeerCopyTest>(transfers_.lanes().cuda(), source, memory,
                                                     destination, std::move(there));
    std::string why;
    const cuda::Status started = test->start(lane->copies_in());
    if (started != cuda::kSuccess)
      why = lane->error_of(started, "peer copies cannot be tested").what();
    lane->when_done(lane->copies_in(), [this, self, lane, test, in_use, why, source, destination,
                                        cannot](cuda::Status done) {
      if (!why.empty()) return cannot(why);
      if (done != cuda::kSuccess)
        return cannot(lane->error_of(done, "peer copies cannot be tested").what());
      if (!test->passed()) return cannot("a test copied wrong bytes");
      transfers_.lanes().set_peer_state(source, destination, PathState::open);
    });
  });
}

DeviceMemory LocalCopies::memory_for_test(Lane& lane) {
  std::string reason;
  if (transfers_.options().allocate) {
    return transfers_.allocate_on(lane, transfers_.options().allocate, PeerCopyTest::kBytes,
                                  lane.copies_in(), reason);
  }
  const CudaApi& cuda = transfers_.lanes().cuda();
  DeviceMemory memory;
  const cuda::Status status = cuda.malloc(&memory.data, PeerCopyTest::kBytes);
  if (status != cuda::kSuccess) {
    (void)lane.error_of(status, "peer copies cannot be tested");
    return {};
  }
  memory.owner = std::shared_ptr<void>(memory.data, [&cuda](void* data) { (void)cuda.free(data); });
  return memory;
}

}  // namespace stitch::transport::gpu
