// Random schedules of many transfers between workers and devices over the double, which checks that
// every access is ordered and reports deadlocks. A failure prints its seed.

#include <gtest/gtest.h>

#include <chrono>
#include <random>

#include "tests/gpu/transfers_world.h"

namespace stitch::transport::gpu::test::transfers_stress_test {
namespace {

using namespace std::chrono_literals;

constexpr int kDevices = 3;

struct Faults {
  bool deaths = false;
  bool errors = false;
  bool no_memory = false;
};

FakeGpu::Options machine(std::uint64_t seed) {
  FakeGpu::Options options;
  options.seed = seed;
  options.devices = kDevices;
  options.hardware_queues = seed % 3 == 0 ? 1 : seed % 3 == 1 ? 2 : 8;
  options.sync_on_alloc = seed % 2 == 0;
  options.sync_on_free = seed % 4 == 0;
  return options;
}

void inject(TransfersWorld& world, std::mt19937_64& random) {
  const char* const nccl_functions[] = {"send", "recv", "comm_get_async_error",
                                        "comm_init_rank_config", "get_unique_id"};
  const int process = static_cast<int>(random() % 4);
  const int nth = 1 + static_cast<int>(random() % 20);
  if (random() % 4 == 0) {
    world.gpu.inject(process, "memcpy_async", cuda::kInvalidValue, nth);
  } else {
    world.gpu.inject(process, nccl_functions[random() % 5], nccl::kSystemError, nth);
  }
}

// Returns how many transfers went over NCCL.
std::uint64_t run(std::uint64_t seed, const Faults& faults) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  TransfersWorld world(
      {.workers = 4,
       .processes = seed % 4 == 1 ? std::vector<int>{0, 0, 1, 2} : std::vector<int>{},
       .gpu = machine(seed),
       .max_delay = std::chrono::microseconds(seed % 7 * 100),
       .adjust = [&](std::size_t, DeviceTransfers::Options& options) {
         options.reopen_backoff = 1ms;
         // An error inside a group ends it in NCCL; the double's injected ones do not.
         options.nccl_piece_bytes = faults.errors ? 1 << 20 : 64 * 1024;
         if (seed % 8 == 7) options.cts_timeout = 1ms;
       }});
  std::vector<std::shared_ptr<TestTransfer>> started;
  std::vector<bool> dead(4);
  const bool any_failure = faults.errors || faults.no_memory || faults.deaths;
  for (int round = 0; round < 8; ++round) {
    std::vector<std::shared_ptr<TestTransfer>> of_round;
    for (int i = 0; i < 40; ++i) {
      const std::size_t from = random() % 4;
      const std::size_t to = random() % 4;
      if (dead[from] || dead[to]) continue;
      const std::size_t bytes = random() % 8 == 0 ? random() % 300000 : random() % 3000;
      // Most transfers are between few pairs, whose communicators they then use.
      const auto device = [&](std::size_t worker) {
        return static_cast<int>((random() % 8 == 0 ? random() : worker) % kDevices);
      };
      const int from_device = device(from);
      of_round.push_back(world.start(from, from_device, to, device(to), bytes,
                                     static_cast<char>('a' + random() % 26)));
    }
    if (faults.errors) inject(world, random);
    if (faults.no_memory) world.failing_allocations = static_cast<int>(random() % 4);
    if (faults.deaths && round == 3) {
      const std::size_t victim = random() % 4;
      dead[victim] = true;
      world.lose(victim);
      world.shut_down(victim, 0ms);
    }
    for (const auto& transfer : of_round) {
      if (dead[transfer->from] || dead[transfer->to]) continue;
      world.wait(*transfer);
      if (::testing::Test::HasFatalFailure()) return 0;
      if (!any_failure) {
        EXPECT_FALSE(transfer->send_error) << transfer->send_error->what();
      }
      if (!transfer->send_error && !transfer->receive_error) {
        world.expect_bytes(*transfer);
      }
    }
    started.insert(started.end(), of_round.begin(), of_round.end());
  }
  for (std::size_t i = 0; i < 4; ++i) world.shut_down(i, 20s);
  for (const auto& transfer : started) {
    EXPECT_EQ(transfer->sent, 1);
    EXPECT_LE(transfer->received, 1);
    if (!dead[transfer->to] && !dead[transfer->from]) {
      EXPECT_EQ(transfer->received, 1);
    }
  }
  std::uint64_t by_nccl = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    const auto counters = world.transfers[i]->counters();
    EXPECT_EQ(counters.outgoing, 0U);
    for (const auto& entry : counters.paths) {
      if (entry.path == Path::nccl && entry.sent) by_nccl += entry.messages;
    }
  }
  return by_nccl;
}

void run_seeds(std::uint64_t first, std::uint64_t count, const Faults& faults) {
  std::uint64_t by_nccl = 0;
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    by_nccl += run(seed, faults);
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(by_nccl, 10 * count);
}

TEST(TransfersStress, EveryTransferArrivesOnceWithItsBytes) { run_seeds(1000, 8, {}); }

TEST(TransfersStress, ErrorsOfTheLibrariesLoseNoTransfer) { run_seeds(2000, 8, {.errors = true}); }

TEST(TransfersStress, MissingMemoryFailsSingleTransfers) {
  run_seeds(3000, 8, {.no_memory = true});
}

TEST(TransfersStress, DyingWorkersTakeNoTransferOfOthersWithThem) {
  run_seeds(4000, 8, {.deaths = true});
}

TEST(TransfersStress, AllOfItAtOnce) {
  run_seeds(5000, 8, {.deaths = true, .errors = true, .no_memory = true});
}

}  // namespace
}  // namespace stitch::transport::gpu::test::transfers_stress_test
