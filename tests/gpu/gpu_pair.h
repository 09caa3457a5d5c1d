#pragma once

#include <gtest/gtest.h>

#include <cstddef>

#include "tests/gpu/double/fake_gpu.h"
#include "tests/support/eventually.h"

namespace stitch::transport::gpu::test {

inline constexpr std::size_t kBytes = 1000;

inline cuda::Stream make_stream(FakeGpu& world, int process = 0,
                                unsigned flags = cuda::kStreamNonBlocking) {
  cuda::Stream stream = nullptr;
  EXPECT_EQ(world.cuda(process).stream_create_with_priority(&stream, flags, 0), cuda::kSuccess);
  return stream;
}
inline char* make_memory(FakeGpu& world, int process = 0) {
  void* memory = nullptr;
  EXPECT_EQ(world.cuda(process).malloc(&memory, kBytes), cuda::kSuccess);
  return static_cast<char*>(memory);
}

// A communicator between processes 0 and 1, on devices 0 and 1, with a stream and memory for each.
struct GpuPair {
  explicit GpuPair(FakeGpu& world, int second_device = 1) : world(world) {
    nccl::UniqueId id;
    EXPECT_EQ(world.nccl(0).get_unique_id(&id), nccl::kSuccess);
    for (int rank : {0, 1}) {
      EXPECT_EQ(world.cuda(rank).set_device(rank == 0 ? 0 : second_device), cuda::kSuccess);
      nccl::Config config;
      config.blocking = 0;
      EXPECT_EQ(world.nccl(rank).comm_init_rank_config(&comm[rank], 2, id, rank, &config),
                nccl::kInProgress);
      stream[rank] = make_stream(world, rank);
      memory[rank] = make_memory(world, rank);
    }
  }
  nccl::Result state(int rank) {
    nccl::Result result = nccl::kInternalError;
    EXPECT_EQ(world.nccl(rank).comm_get_async_error(comm[rank], &result), nccl::kSuccess);
    return result;
  }
  // Until the rank's last call is done.
  nccl::Result wait(int rank) {
    EXPECT_TRUE(stitch::testing::eventually([&] { return state(rank) != nccl::kInProgress; }));
    return state(rank);
  }
  nccl::Result send(int rank, std::size_t bytes = kBytes) {
    return world.nccl(rank).send(memory[rank], bytes, nccl::kInt8, 1 - rank, comm[rank],
                                 stream[rank]);
  }
  nccl::Result recv(int rank, std::size_t bytes = kBytes) {
    return world.nccl(rank).recv(memory[rank], bytes, nccl::kInt8, 1 - rank, comm[rank],
                                 stream[rank]);
  }
  // A byte in each direction.
  void connect() {
    for (int rank : {0, 1}) {
      EXPECT_EQ(wait(rank), nccl::kSuccess);
      world.nccl(rank).group_start();
      send(rank, 1);
      world.nccl(rank).recv(memory[rank] + 1, 1, nccl::kInt8, 1 - rank, comm[rank], stream[rank]);
      EXPECT_EQ(world.nccl(rank).group_end(), nccl::kInProgress);
    }
    EXPECT_EQ(world.wait_until_idle(), "");
    for (int rank : {0, 1}) EXPECT_EQ(wait(rank), nccl::kSuccess);
  }

  FakeGpu& world;
  nccl::Comm comm[2] = {nullptr, nullptr};
  cuda::Stream stream[2] = {nullptr, nullptr};
  char* memory[2] = {nullptr, nullptr};
};

}  // namespace stitch::transport::gpu::test
