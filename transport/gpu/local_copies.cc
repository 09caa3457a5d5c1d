#include "stitch/transport/gpu/local_copies.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "stitch/transport/gpu/transfers.h"

namespace stitch::transport::gpu {
namespace {

constexpr std::size_t kTestedBytes = 65536;

// Copies of a pattern from device to device and back to the host: broken peer-to-peer hardware
// (misconfigured IOMMU) reports success and copies garbage. On the lane of the destination.
struct PeerCopyTest {
  const CudaApi& cuda;
  const int source;
  const int destination;
  void* const at_source;  // kTestedBytes on each device
  const DeviceMemory at_destination;
  unsigned char* host = nullptr;

  ~PeerCopyTest() {
    if (host != nullptr) (void)cuda.free_host(host);
  }
  cuda::Status start(cuda::Stream stream) {
    int can = 0;
    void* memory = nullptr;
    void* const there = at_destination.data;
    cuda::Status status = cuda.device_can_access_peer(&can, destination, source);
    const auto ok = [&status](cuda::Status next) { return (status = next) == cuda::kSuccess; };
    if (ok(status) && can != 0) {
      status = cuda.device_enable_peer_access(source, 0);
      if (status == cuda::kPeerAccessAlreadyEnabled) {
        (void)cuda.get_last_error();
        status = cuda::kSuccess;
      }
    }
    if (!ok(status) || !ok(cuda.host_alloc(&memory, 2 * kTestedBytes, cuda::kHostAllocPortable)))
      return status;
    host = static_cast<unsigned char*>(memory);
    for (std::size_t i = 0; i < kTestedBytes; ++i) {
      host[i] = static_cast<unsigned char>(i * 7 + i / 251);
      host[kTestedBytes + i] = 0;
    }
    unsigned char* const back = host + kTestedBytes;
    static_cast<void>(
        ok(cuda.memcpy_async(there, host, kTestedBytes, cuda::kHostToDevice, stream)) &&
        ok(cuda.memcpy_peer_async(at_source, source, there, destination, kTestedBytes, stream)) &&
        ok(cuda.memset_async(there, 0, kTestedBytes, stream)) &&
        ok(cuda.memcpy_peer_async(there, destination, at_source, source, kTestedBytes, stream)) &&
        ok(cuda.memcpy_async(back, there, kTestedBytes, cuda::kDeviceToHost, stream)));
    return status;
  }
  [[nodiscard]] bool passed() const {
    return std::memcmp(host, host + kTestedBytes, kTestedBytes) == 0;
  }
};

}  // namespace

void LocalCopies::start(const IncomingPtr& transfer, std::uint64_t key) {
  const auto hello = transfers_.hello_of(transfer->from);
  Lanes& lanes = transfers_.lanes();
  IncomingTransfers& incoming = transfers_.incoming();
  std::optional<Lanes::LocalSource> source =
      hello ? lanes.take(hello->uid, transfer->id, key) : std::nullopt;
  if (!source || source->bytes != transfer->bytes) return incoming.retry(transfer);
  Lane& lane = *transfer->lane;
  if (source->device == lane.device() && incoming.adopt(transfer, source->owner))
    return incoming.finish(transfer, std::nullopt);
  if (!incoming.allocate(transfer, lane.copies_in()))
    return incoming.finish(transfer, transfer->no_memory);
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
    if (from == lane.device() || lane.failure())
      return transfers_.incoming().finish(transfer, error);
    failed(transfer->from, lane.device(), from, lane.device(), error.what());
    transfers_.incoming().retry(transfer);
  };
  if (status != cuda::kSuccess) return not_copied(status);
  lane.when_done(lane.copies_in(), [this, self = transfers_.self(), transfer, not_copied,
                                    source = std::move(source)](cuda::Status done) {
    if (done == cuda::kSuccess) return transfers_.incoming().finish(transfer, std::nullopt);
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
  lane->post([this, self = transfers_.self(), lane, source, destination, cannot,
              memory = allocated->data, in_use] {
    DeviceMemory there = memory_for_test(*lane);
    if (there.data == nullptr) return cannot("there is no memory to test it");
    const std::shared_ptr<PeerCopyTest> test(
        new PeerCopyTest{transfers_.lanes().cuda(), source, destination, memory, std::move(there)});
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
    return transfers_.allocate(lane, transfers_.options().allocate, kTestedBytes, lane.copies_in(),
                               reason);
  }
  const CudaApi& cuda = transfers_.lanes().cuda();
  DeviceMemory memory;
  if (cuda.malloc(&memory.data, kTestedBytes) != cuda::kSuccess) {
    lane.find_failure();
    return {};
  }
  memory.owner = std::shared_ptr<void>(memory.data, [&cuda](void* data) { (void)cuda.free(data); });
  return memory;
}

}  // namespace stitch::transport::gpu
