#pragma once

#include <cstddef>
#include <functional>

#include "stitch/transport/gpu/cuda_api.h"
#include "stitch/transport/gpu/nccl_api.h"

namespace stitch_bench {

// What copies and NCCL reach here without stitch and without torch, through the functions that CUDA
// and NCCL have in this process: bytes moved in GB/s (10^9), each the median of batches of copies
// that the host waits for once. Throws std::runtime_error with CUDA's or NCCL's text. Thread
// contract: one thread.
class GpuCeilings {
 public:
  // Measures for `seconds` each.
  GpuCeilings(const stitch::transport::gpu::CudaApi& cuda, double seconds)
      : cuda_(cuda), seconds_(seconds) {}

  [[nodiscard]] double device_copy(int device, std::size_t bytes) const;
  // cudaMemcpyPeer.
  [[nodiscard]] double peer_copy(int from, int to, std::size_t bytes) const;
  // To and from pinned memory.
  [[nodiscard]] double to_host(int device, std::size_t bytes) const;
  [[nodiscard]] double from_host(int device, std::size_t bytes) const;

 private:
  using Copy = std::function<stitch::transport::gpu::cuda::Status(
      stitch::transport::gpu::cuda::Stream stream)>;
  [[nodiscard]] double rate(int device, std::size_t bytes, const Copy& copy) const;

  const stitch::transport::gpu::CudaApi& cuda_;
  const double seconds_;
};

// One of two ranks, in a process or thread each. Not thread-safe; owned by its rank.
class NcclPair {
 public:
  using Cuda = stitch::transport::gpu::CudaApi;
  using Nccl = stitch::transport::gpu::NcclApi;
  using UniqueId = stitch::transport::gpu::nccl::UniqueId;

  // Waits for the other rank, which is given the same id (of new_id()).
  NcclPair(const Cuda& cuda, const Nccl& nccl, const UniqueId& id, int rank, int device);
  ~NcclPair();
  NcclPair(const NcclPair&) = delete;
  NcclPair& operator=(const NcclPair&) = delete;
  [[nodiscard]] static UniqueId new_id(const Nccl& nccl);

  // GB/s. Both ranks call the same with the same number. Both send and receive at once, as in
  // sendrecv_perf of nccl-tests: in each direction.
  [[nodiscard]] double send_and_receive(std::size_t bytes);
  // Rank 0 sends and rank 1 receives, as a transfer of stitch does.
  [[nodiscard]] double send_one_way(std::size_t bytes);

 private:
  // Sends and receives within one group, on `stream`; 0: not.
  void exchange(stitch::transport::gpu::cuda::Stream stream, const void* from, std::size_t sent,
                void* to, std::size_t received);
  void require(stitch::transport::gpu::nccl::Result result, const char* what) const;
  void wait_until_done(stitch::transport::gpu::nccl::Result result, const char* what) const;

  const Cuda& cuda_;
  const Nccl& nccl_;
  const int rank_;
  const int device_;
  stitch::transport::gpu::nccl::Comm comm_ = nullptr;
};

}  // namespace stitch_bench
