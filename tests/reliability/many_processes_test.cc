// Many processes on one host with few descriptors: they start, call all others and shut down.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "stitch/stitch.h"
#include "tests/support/forked_world.h"

namespace many_processes_test {
namespace {

using namespace std::chrono_literals;
using stitch::Options;
using stitch::testing::ForkedWorld;

constexpr int kWorkers = 64;

int add_one(int value) { return value + 1; }

// Memory of this process, shared pages divided among those that use them.
std::int64_t proportional_kib() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string word; file >> word;) {
    std::int64_t kib = 0;
    if (word == "Pss:" && file >> kib) return kib;
  }
  return 0;
}

TEST(ManyProcesses, StartCallAllOthersAndShutDown) {
  const auto start = std::chrono::steady_clock::now();
  ForkedWorld world(
      kWorkers,
      [&world](Options options) {
        const rlimit few{1024, 1024};
        ::setrlimit(RLIMIT_NOFILE, &few);
        options.num_threads = 2;
        auto self = stitch::init(std::move(options));
        std::vector<stitch::Future<int>> calls;
        for (const auto& peer : self.workers())
          calls.push_back(self.rpc_async<add_one>(peer, self.rank()));
        for (auto& call : calls) {
          if (call.get() != self.rank() + 1) return 1;
        }
        self.barrier();
        std::ofstream(world.folder() / ("memory" + std::to_string(self.rank())))
            << proportional_kib();
        self.shutdown();
        return 0;
      },
      120s);
  std::int64_t kib = 0;
  for (int rank = 0; rank < kWorkers; ++rank) {
    const auto outcome = world.wait(rank);
    EXPECT_EQ(outcome.status, 0) << rank << ", signal " << outcome.signal;
    EXPECT_EQ(outcome.said, "") << rank;
    std::int64_t its = 0;
    std::ifstream(world.folder() / ("memory" + std::to_string(rank))) >> its;
    EXPECT_GT(its, 0);
    kib += its;
  }
  const auto took = std::chrono::steady_clock::now() - start;
  std::printf("%d processes: %.1f s, %.0f MiB in all\n", kWorkers,
              std::chrono::duration<double>(took).count(), static_cast<double>(kib) / 1024);
  EXPECT_LT(took, 60s);
  EXPECT_LT(kib, std::int64_t{3} << 20);
}

}  // namespace
}  // namespace many_processes_test
