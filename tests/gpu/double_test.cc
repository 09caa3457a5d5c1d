// Each rule of the double is shown by a program that keeps it and one that breaks it.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tests/gpu/double/fake_gpu.h"

namespace stitch::transport::gpu::test {
namespace {

constexpr std::size_t kBytes = 1000;

cuda::Stream make_stream(FakeGpu& world, int process = 0) {
  cuda::Stream stream = nullptr;
  EXPECT_EQ(world.cuda(process).stream_create_with_priority(&stream, cuda::kStreamNonBlocking, 0),
            cuda::kSuccess);
  return stream;
}

cuda::Event make_event(FakeGpu& world, int process = 0) {
  cuda::Event event = nullptr;
  EXPECT_EQ(world.cuda(process).event_create_with_flags(&event, cuda::kEventDisableTiming),
            cuda::kSuccess);
  return event;
}

char* make_memory(FakeGpu& world, int process = 0, std::size_t bytes = kBytes) {
  void* memory = nullptr;
  EXPECT_EQ(world.cuda(process).malloc(&memory, bytes), cuda::kSuccess);
  return static_cast<char*>(memory);
}

::testing::AssertionResult says(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "\"" << part << "\" is not in:\n" << text;
}

TEST(GpuDouble, CopiesMoveBytesWhenTheyExecute) {
  FakeGpu world;
  const auto stream = make_stream(world);
  char* const device = make_memory(world);
  std::vector<char> host(kBytes, 'a');
  ASSERT_EQ(world.cuda().memcpy_async(device, host.data(), kBytes, cuda::kHostToDevice, stream),
            cuda::kSuccess);
  EXPECT_NE(device[0], 'a');
  EXPECT_EQ(world.run(), "");
  EXPECT_EQ(std::string(device, kBytes), std::string(kBytes, 'a'));
}

TEST(GpuDouble, AStreamIsInOrder) {
  FakeGpu world;
  const auto stream = make_stream(world);
  char* const memory = make_memory(world);
  const auto equal = std::make_shared<bool>(false);
  world.fill(0, stream, memory, kBytes, 'x');
  world.check(0, stream, memory, kBytes, 'x', equal);
  EXPECT_EQ(world.run(), "");
  EXPECT_TRUE(*equal);
}

TEST(GpuDouble, AMissingWaitIsReported) {
  for (const bool waits : {true, false}) {
    FakeGpu world({.seed = 7});
    const auto writer = make_stream(world), reader = make_stream(world);
    const auto event = make_event(world);
    char* const memory = make_memory(world);
    const auto equal = std::make_shared<bool>(false);
    world.fill(0, writer, memory, kBytes, 'x');
    ASSERT_EQ(world.cuda().event_record(event, writer), cuda::kSuccess);
    if (waits) {
      ASSERT_EQ(world.cuda().stream_wait_event(reader, event, 0), cuda::kSuccess);
    }
    world.check(0, reader, memory, kBytes, 'x', equal);
    EXPECT_EQ(world.run(), "");
    const std::string violations = world.take_violations();
    if (waits) {
      EXPECT_EQ(violations, "");
      EXPECT_TRUE(*equal);
    } else {
      EXPECT_TRUE(says(violations, "is not ordered after"));
      EXPECT_TRUE(says(violations, "seed 7"));
    }
  }
}

struct Pair {
  explicit Pair(FakeGpu& world) : world(world) {
    nccl::UniqueId id;
    EXPECT_EQ(world.nccl(0).get_unique_id(&id), nccl::kSuccess);
    for (int rank : {0, 1}) {
      EXPECT_EQ(world.cuda(rank).set_device(rank), cuda::kSuccess);
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
  void wait(int rank) {
    while (state(rank) == nccl::kInProgress && world.step()) {
    }
  }
  nccl::Result send(int rank, std::size_t bytes = kBytes) {
    return world.nccl(rank).send(memory[rank], bytes, nccl::kInt8, 1 - rank, comm[rank],
                                 stream[rank]);
  }
  nccl::Result recv(int rank, std::size_t bytes = kBytes) {
    return world.nccl(rank).recv(memory[rank], bytes, nccl::kInt8, 1 - rank, comm[rank],
                                 stream[rank]);
  }

  FakeGpu& world;
  nccl::Comm comm[2] = {nullptr, nullptr};
  cuda::Stream stream[2] = {nullptr, nullptr};
  char* memory[2] = {nullptr, nullptr};
};

TEST(GpuDouble, NcclMovesBytesBetweenTwoProcesses) {
  FakeGpu world;
  Pair pair(world);
  pair.wait(0);
  pair.wait(1);
  world.fill(0, pair.stream[0], pair.memory[0], kBytes, 's');
  EXPECT_EQ(pair.send(0), nccl::kInProgress);
  EXPECT_EQ(pair.recv(1), nccl::kInProgress);
  EXPECT_EQ(world.run(), "");
  EXPECT_EQ(pair.state(0), nccl::kSuccess);
  EXPECT_EQ(std::string(pair.memory[1], kBytes), std::string(kBytes, 's'));
}

TEST(GpuDouble, BothSidesSendingFirstIsADeadlockWithItsCycle) {
  FakeGpu world({.seed = 11});
  Pair pair(world);
  pair.wait(0);
  pair.wait(1);
  // Connected in both directions first, so that it is the transfers that wait for each other.
  for (int rank : {0, 1}) {
    world.nccl(rank).group_start();
    pair.send(rank);
    world.nccl(rank).recv(make_memory(world, rank), kBytes, nccl::kInt8, 1 - rank, pair.comm[rank],
                          pair.stream[rank]);
    world.nccl(rank).group_end();
  }
  ASSERT_EQ(world.run(), "");
  for (int rank : {0, 1}) ASSERT_EQ(pair.send(rank), nccl::kInProgress);
  for (int rank : {0, 1}) pair.wait(rank);
  for (int rank : {0, 1}) ASSERT_EQ(pair.recv(rank), nccl::kInProgress);
  const std::string report = world.run();
  EXPECT_TRUE(says(report, "deadlock: a cycle of 4"));
  EXPECT_TRUE(says(report, "seed 11"));
}

}  // namespace
}  // namespace stitch::transport::gpu::test
