// A peer that is lost in mid-transfer, by each path and at many moments, as its destination and as
// its source: what the others have to do with it fails, what they do among themselves arrives.

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/gpu/transfers_world.h"

namespace stitch::transport::gpu::test::transfers_death_test {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kDyingBytes = std::size_t{9} << 20;
constexpr std::size_t kOtherBytes = std::size_t{3} << 20;
constexpr int kDeaths = 50;

struct Way {
  Path path;
  bool one_process;
  int to_device;
};

// Worker 0 goes on; worker 1 dies. Whether a transfer of worker 0 failed by that.
bool die(const Way& way, std::uint64_t seed) {
  SCOPED_TRACE(std::string(to_string(way.path)) + ", seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  TransfersWorld world(
      {.workers = 3,
       .processes = way.one_process ? std::vector<int>{0, 0, 1} : std::vector<int>{},
       .gpu = {.seed = seed, .hardware_queues = seed % 2 == 0 ? 1 : 8},
       .max_delay = 50us,
       .adjust = [&](std::size_t, DeviceTransfers::Options& options) {
         options.use_nccl = way.path == Path::nccl;
         options.nccl_piece_bytes = std::size_t{4} << 20;
       }});
  world.await_path(0, 0, 1, way.to_device, way.path);
  if (::testing::Test::HasFatalFailure()) return false;
  std::vector<std::shared_ptr<TestTransfer>> doomed;
  for (int i = 0; i < 2; ++i) {
    doomed.push_back(world.start(0, 0, 1, way.to_device, kDyingBytes, 'a'));
    doomed.push_back(world.start(1, way.to_device, 0, 0, kDyingBytes, 'b'));
  }
  const auto others = world.start(0, 0, 2, way.to_device, kOtherBytes, 'c');
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
  world.lose(1);
  world.shut_down(1, 0ms);
  world.wait(*others);
  if (::testing::Test::HasFatalFailure()) return false;
  world.expect_bytes(*others);
  // Worker 0 has been told of the loss on a thread of its own: all of it has ended soon.
  const auto deadline = std::chrono::steady_clock::now() + 20s;
  while (world.transfers[0]->under_way() > 0 && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(100us);
  EXPECT_EQ(world.transfers[0]->under_way(), 0U);
  world.shut_down(0, 20s);
  bool failed = false;
  for (const auto& transfer : doomed) {
    failed = failed || (transfer->from == 0 && transfer->send_error);
    EXPECT_EQ(transfer->sent, 1);
    EXPECT_LE(transfer->received, 1);  // its message may not have come
    if (!transfer->send_error) {
      EXPECT_EQ(transfer->received, 1);
      EXPECT_FALSE(transfer->receive_error);
    }
  }
  return failed;
}

void die_often(const Way& way) {
  int failed = 0;
  for (std::uint64_t seed = 1; seed <= kDeaths; ++seed) {
    failed += die(way, seed) ? 1 : 0;
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(failed, kDeaths / 10);  // in mid-transfer
}

TEST(TransfersDeath, ByStagingEndsWhatThePeerHadAndNoMore) { die_often({Path::staging, false, 1}); }
TEST(TransfersDeath, ByACopyOnTheDeviceEndsWhatThePeerHadAndNoMore) {
  die_often({Path::local, true, 0});
}
TEST(TransfersDeath, ByACopyBetweenDevicesEndsWhatThePeerHadAndNoMore) {
  die_often({Path::peer, true, 1});
}
TEST(TransfersDeath, ByNcclEndsWhatThePeerHadAndNoMore) { die_often({Path::nccl, false, 1}); }

}  // namespace
}  // namespace stitch::transport::gpu::test::transfers_death_test
