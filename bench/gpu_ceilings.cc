#include "gpu_ceilings.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "timing.h"

namespace stitch_bench {

namespace {

namespace cuda = stitch::transport::gpu::cuda;
namespace nccl = stitch::transport::gpu::nccl;
using stitch::transport::gpu::CudaApi;

constexpr int kBatch = 10;  // copies that the host waits for once

void require(const CudaApi& api, cuda::Status status, const char* what) {
  if (status == cuda::kSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + api.get_error_string(status));
}

class Stream {
 public:
  Stream(const CudaApi& api, int device) : api_(api) {
    require(api_, api_.set_device(device), "cudaSetDevice");
    require(api_, api_.stream_create_with_priority(&stream_, cuda::kStreamNonBlocking, 0),
            "cudaStreamCreate");
  }
  ~Stream() { static_cast<void>(api_.stream_destroy(stream_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  [[nodiscard]] cuda::Stream get() const { return stream_; }
  void wait() const { require(api_, api_.stream_synchronize(stream_), "cudaStreamSynchronize"); }

 private:
  const CudaApi& api_;
  cuda::Stream stream_ = nullptr;
};

class DeviceBytes {
 public:
  DeviceBytes(const CudaApi& api, int device, std::size_t bytes) : api_(api) {
    require(api_, api_.set_device(device), "cudaSetDevice");
    require(api_, api_.malloc(&data_, bytes), "cudaMalloc");
  }
  ~DeviceBytes() { static_cast<void>(api_.free(data_)); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  [[nodiscard]] void* get() const { return data_; }
  // So that what is copied has been written.
  void clear(std::size_t bytes, const Stream& stream) const {
    require(api_, api_.memset_async(data_, 0, bytes, stream.get()), "cudaMemset");
  }

 private:
  const CudaApi& api_;
  void* data_ = nullptr;
};

class PinnedBytes {
 public:
  PinnedBytes(const CudaApi& api, std::size_t bytes) : api_(api) {
    require(api_, api_.host_alloc(&data_, bytes, cuda::kHostAllocPortable), "cudaHostAlloc");
    std::fill_n(static_cast<char*>(data_), bytes, '\0');
  }
  ~PinnedBytes() { static_cast<void>(api_.free_host(data_)); }
  PinnedBytes(const PinnedBytes&) = delete;
  PinnedBytes& operator=(const PinnedBytes&) = delete;
  [[nodiscard]] void* get() const { return data_; }

 private:
  const CudaApi& api_;
  void* data_ = nullptr;
};

}  // namespace

double GpuCeilings::rate(int device, std::size_t bytes, const Copy& copy) const {
  const Stream stream(cuda_, device);
  const auto times = time_each_us(seconds_, 3, [&] {
    for (int i = 0; i < kBatch; ++i) require(cuda_, copy(stream.get()), "a copy");
    stream.wait();
  });
  return kBatch * static_cast<double>(bytes) / (median(times) * 1e-6) / 1e9;
}

double GpuCeilings::device_copy(int device, std::size_t bytes) const {
  const DeviceBytes from(cuda_, device, bytes);
  const DeviceBytes to(cuda_, device, bytes);
  {
    const Stream stream(cuda_, device);
    from.clear(bytes, stream);
    stream.wait();
  }
  return rate(device, bytes, [&](cuda::Stream stream) {
    return cuda_.memcpy_async(to.get(), from.get(), bytes, cuda::kDeviceToDevice, stream);
  });
}

double GpuCeilings::peer_copy(int from_device, int to_device, std::size_t bytes) const {
  const DeviceBytes from(cuda_, from_device, bytes);
  const DeviceBytes to(cuda_, to_device, bytes);
  {
    const Stream stream(cuda_, from_device);
    from.clear(bytes, stream);
    stream.wait();
  }
  // Over NVLink where there is one; without access CUDA goes through the host.
  int can = 0;
  require(cuda_, cuda_.device_can_access_peer(&can, from_device, to_device),
          "cudaDeviceCanAccessPeer");
  if (can != 0) {
    require(cuda_, cuda_.set_device(from_device), "cudaSetDevice");
    const auto status = cuda_.device_enable_peer_access(to_device, 0);
    if (status != cuda::kPeerAccessAlreadyEnabled)
      require(cuda_, status, "cudaDeviceEnablePeerAccess");
    static_cast<void>(cuda_.get_last_error());
  }
  return rate(from_device, bytes, [&](cuda::Stream stream) {
    return cuda_.memcpy_peer_async(to.get(), to_device, from.get(), from_device, bytes, stream);
  });
}

double GpuCeilings::to_host(int device, std::size_t bytes) const {
  const DeviceBytes from(cuda_, device, bytes);
  const PinnedBytes to(cuda_, bytes);
  {
    const Stream stream(cuda_, device);
    from.clear(bytes, stream);
    stream.wait();
  }
  return rate(device, bytes, [&](cuda::Stream stream) {
    return cuda_.memcpy_async(to.get(), from.get(), bytes, cuda::kDeviceToHost, stream);
  });
}

double GpuCeilings::from_host(int device, std::size_t bytes) const {
  const DeviceBytes to(cuda_, device, bytes);
  const PinnedBytes from(cuda_, bytes);
  return rate(device, bytes, [&](cuda::Stream stream) {
    return cuda_.memcpy_async(to.get(), from.get(), bytes, cuda::kHostToDevice, stream);
  });
}

namespace {

constexpr int kWarm = 5;
constexpr int kTimes = 20;

}  // namespace

NcclPair::UniqueId NcclPair::new_id(const Nccl& nccl) {
  UniqueId id{};
  const auto result = nccl.get_unique_id(&id);
  if (result != nccl::kSuccess)
    throw std::runtime_error(std::string("ncclGetUniqueId: ") + nccl.get_error_string(result));
  return id;
}

NcclPair::NcclPair(const Cuda& cuda, const Nccl& nccl, const UniqueId& id, int rank, int device)
    : cuda_(cuda), nccl_(nccl), rank_(rank), device_(device) {
  stitch_bench::require(cuda_, cuda_.set_device(device_), "cudaSetDevice");
  // Neither end may wait in NCCL for one that has failed: the other process is stopped then.
  nccl::Config config;
  config.blocking = 0;
  wait_until_done(nccl_.comm_init_rank_config(&comm_, 2, id, rank, &config),
                  "ncclCommInitRankConfig");
}

NcclPair::~NcclPair() {
  if (comm_ == nullptr) return;
  static_cast<void>(cuda_.set_device(device_));
  static_cast<void>(nccl_.comm_abort(comm_));
}

void NcclPair::require(nccl::Result result, const char* what) const {
  if (result == nccl::kSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + nccl_.get_error_string(result) + ", " +
                           nccl_.get_last_error(nullptr));
}

void NcclPair::wait_until_done(nccl::Result result, const char* what) const {
  using namespace std::chrono_literals;
  const auto limit = Clock::now() + 60s;
  while (result == nccl::kInProgress) {
    if (Clock::now() > limit) throw std::runtime_error(std::string(what) + " takes over 60 s");
    // NCCL offers nothing to wait for, and to sleep between groups would be measured.
    std::this_thread::yield();
    const auto asked = nccl_.comm_get_async_error(comm_, &result);
    if (asked != nccl::kSuccess) result = asked;
  }
  require(result, what);
}

void NcclPair::exchange(cuda::Stream stream, const void* from, std::size_t sent, void* to,
                        std::size_t received) {
  // Within a group, calls only note what the end of the group begins.
  const auto queued = [&](nccl::Result result, const char* what) {
    if (result != nccl::kInProgress) require(result, what);
  };
  const int other = 1 - rank_;
  require(nccl_.group_start(), "ncclGroupStart");
  if (sent > 0) queued(nccl_.send(from, sent, nccl::kInt8, other, comm_, stream), "ncclSend");
  if (received > 0) queued(nccl_.recv(to, received, nccl::kInt8, other, comm_, stream), "ncclRecv");
  wait_until_done(nccl_.group_end(), "ncclGroupEnd");
}

double NcclPair::send_and_receive(std::size_t bytes) {
  const DeviceBytes from(cuda_, device_, bytes);
  const DeviceBytes to(cuda_, device_, bytes);
  const Stream stream(cuda_, device_);
  from.clear(bytes, stream);
  const auto run = [&](int times) {
    for (int i = 0; i < times; ++i) exchange(stream.get(), from.get(), bytes, to.get(), bytes);
    stream.wait();
  };
  run(kWarm);
  const auto start = Clock::now();
  run(kTimes);
  return kTimes * static_cast<double>(bytes) / seconds_since(start) / 1e9;
}

double NcclPair::send_one_way(std::size_t bytes) {
  const DeviceBytes memory(cuda_, device_, bytes);
  const Stream stream(cuda_, device_);
  memory.clear(bytes, stream);
  const bool sends = rank_ == 0;
  const auto run = [&](int times) {
    for (int i = 0; i < times; ++i)
      exchange(stream.get(), memory.get(), sends ? bytes : 0, memory.get(), sends ? 0 : bytes);
    // One byte back: the sender's own kernels end before the last bytes have arrived.
    exchange(stream.get(), memory.get(), sends ? 0 : 1, memory.get(), sends ? 1 : 0);
    stream.wait();
  };
  run(kWarm);
  const auto start = Clock::now();
  run(kTimes);
  return kTimes * static_cast<double>(bytes) / seconds_since(start) / 1e9;
}

}  // namespace stitch_bench
