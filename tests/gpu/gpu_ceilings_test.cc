// What stitch-bench compares paths with keeps the rules of CUDA and NCCL: over their double, which
// says nothing of speed.
#include "bench/gpu_ceilings.h"

#include <gtest/gtest.h>

#include <future>
#include <stdexcept>

#include "tests/gpu/double/fake_gpu.h"

namespace stitch_bench::gpu_ceilings_test {
namespace {

using stitch::transport::gpu::test::FakeGpu;

constexpr std::size_t kBytes = 4096;

TEST(GpuCeilings, CopiesAreMeasured) {
  FakeGpu world;
  const GpuCeilings ceilings(world.cuda(), 0.01);
  EXPECT_GT(ceilings.device_copy(0, kBytes), 0);
  EXPECT_GT(ceilings.peer_copy(0, 1, kBytes), 0);
  EXPECT_GT(ceilings.peer_copy(0, 1, kBytes), 0) << "access has been enabled already";
  EXPECT_GT(ceilings.to_host(0, kBytes), 0);
  EXPECT_GT(ceilings.from_host(1, kBytes), 0);
}

TEST(GpuCeilings, MemoryThatIsShortIsAnErrorWithCudasText) {
  FakeGpu world;
  const GpuCeilings ceilings(world.cuda(), 0.01);
  EXPECT_THROW(static_cast<void>(ceilings.device_copy(0, std::size_t{1} << 40)),
               std::runtime_error);
}

TEST(GpuCeilings, TwoRanksSendAndReceiveAtTheSameTimeAndOneAfterTheOther) {
  for (const bool one_way : {false, true}) {
    FakeGpu world;
    const auto id = NcclPair::new_id(world.nccl(0));
    const auto rank = [&](int number) {
      NcclPair pair(world.cuda(number), world.nccl(number), id, number, number);
      return one_way ? pair.send_one_way(kBytes) : pair.send_and_receive(kBytes);
    };
    auto other = std::async(std::launch::async, rank, 1);
    EXPECT_GT(rank(0), 0);
    EXPECT_GT(other.get(), 0);
    if (one_way) {
      EXPECT_EQ(world.calls("nccl_send", 1), 2U) << "of one byte, after each batch";
    }
  }
}

}  // namespace
}  // namespace stitch_bench::gpu_ceilings_test
