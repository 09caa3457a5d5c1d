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
  // One after the other through memory between them, as bytes go between processes on one GPU.
  [[nodiscard]] double two_copies(int device, std::size_t bytes) const;
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

// One of two ranks, in a process or thread each, that send one another `bytes` at the same time, as
// sendrecv_perf of nccl-tests has them do. Not thread-safe; owned by its rank.
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

  // GB/s in each direction. Both ranks call it with the same number.
  [[nodiscard]] double send_and_receive(std::size_t bytes);

 private:
  void require(stitch::transport::gpu::nccl::Result result, const char* what) const;
  void wait_until_done(stitch::transport::gpu::nccl::Result result, const char* what) const;

  const Cuda& cuda_;
  const Nccl& nccl_;
  const int other_;
  const int device_;
  stitch::transport::gpu::nccl::Comm comm_ = nullptr;
};

}  // namespace stitch_bench
