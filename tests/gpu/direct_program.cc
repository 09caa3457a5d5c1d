// One worker of a world of processes, each over a double of its own, for direct_process_test.cc.
// The first argument says what it does.
#include <ATen/ATen.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "stitch/rpc/worker.h"
#include "tests/gpu/device_tensors.h"
#include "tests/gpu/double_torch_device.h"
#include "tests/support/eventually.h"

namespace direct_program {

using namespace std::chrono_literals;
using stitch::testing::eventually;
using stitch::testing::filled;
using stitch::testing::holds;
namespace fake = stitch::testing::double_device;

[[maybe_unused]] const bool installed = fake::install();

constexpr std::int64_t kFloats = 300'000;
constexpr std::int64_t kManyFloats = 6'000'000;
constexpr int kCalls = 12;

at::Tensor twice(const at::Tensor& tensor) { return tensor * 2; }
void die_after(int microseconds) {
  std::thread([microseconds] {
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    kill(getpid(), SIGKILL);
  }).detach();
}

std::int64_t sent_to(const stitch::Worker& self, const std::string& peer) {
  std::int64_t sum = 0;
  for (const auto& [name, number] : self.debug_info()) {
    if (name.starts_with("gpu.sent_messages.staging." + peer + ".")) sum += number;
  }
  return sum;
}
std::atomic<const stitch::Worker*> this_worker{nullptr};
std::int64_t answered() {
  const stitch::Worker* const worker = this_worker;
  return worker == nullptr ? 0 : sent_to(*worker, "worker0");
}

// Calls worker 1 until tensors have gone there and back.
bool reaches(const stitch::Worker& self) {
  return eventually([&] {
    return holds(stitch::rpc_sync<twice>("worker1", filled(0, 3, {kFloats})), 0, 6) &&
           sent_to(self, "worker1") > 0 && stitch::rpc_sync<answered>("worker1") > 0;
  });
}

int calls(const stitch::Worker& self) {
  if (self.rank() != 0) return 0;
  if (!reaches(self)) return 1;
  const auto before = sent_to(self, "worker1");
  std::vector<stitch::Future<at::Tensor>> results;
  for (int i = 0; i < kCalls; ++i)
    results.push_back(
        stitch::rpc_async<twice>("worker1", filled(0, static_cast<float>(i), {kManyFloats})));
  for (int i = 0; i < kCalls; ++i) {
    if (!holds(results[static_cast<std::size_t>(i)].get(), 0, static_cast<float>(2 * i))) return 1;
  }
  if (!eventually([&] { return sent_to(self, "worker1") >= before + kCalls; })) return 1;
  std::printf("%d calls\n", kCalls);
  return 0;
}

// Worker 1 dies in the middle of transfers there and back; worker 2 goes on.
int death(const stitch::Worker& self, int microseconds) {
  if (self.rank() == 1) std::this_thread::sleep_for(60s);  // killed long before
  if (self.rank() != 0) return 0;
  if (!reaches(self)) return 1;
  std::vector<stitch::Future<at::Tensor>> results;
  for (int i = 0; i < kCalls; ++i)
    results.push_back(stitch::rpc_async<twice>("worker1", filled(0, 1, {kManyFloats})));
  stitch::notify<die_after>("worker1", microseconds);
  int failed = 0;
  for (auto& result : results) {
    if (!eventually([&] { return result.ready(); })) {
      std::printf("a call does not end\n");
      return 1;
    }
    if (!result.has_error()) {
      if (!holds(result.get(), 0, 2)) return 1;
      continue;
    }
    ++failed;
  }
  if (!eventually([&] {
        const auto numbers = self.debug_info();
        return numbers.at("gpu.transfers_sending") == 0 &&
               numbers.at("gpu.transfers_receiving") == 0;
      })) {
    std::printf("transfers do not end\n");
    return 1;
  }
  if (!holds(stitch::rpc_sync<twice>("worker2", filled(0, 4, {kFloats})), 0, 8)) return 1;
  std::printf("%s\nworker2 goes on\n", failed > 0 ? "calls failed" : "all calls had ended");
  return 0;
}

}  // namespace direct_program

int main(int argc, char** argv) try {
  using namespace direct_program;
  if (argc < 2) return 2;
  const std::string what = argv[1];
  const char* const rank = std::getenv("RANK");
  const bool first = rank != nullptr && std::string(rank) == "0";
  stitch::Options options;
  // Worker 0's cuda:0 and cuda:1 of the others.
  if (first) {
    options.device_maps["worker1"] = {{"cuda:0", "cuda:1"}};
    if (what == "death") options.device_maps["worker2"] = {{"cuda:0", "cuda:1"}};
  }
  options.gpu_paths = {"staging"};
  int status = 0;
  {
    const auto self = stitch::init(options);
    this_worker = &self;
    status = what == "calls"               ? calls(self)
             : what == "death" && argc > 2 ? death(self, std::stoi(argv[2]))
                                           : 2;
  }
  const std::string violations = fake::take_violations();
  if (violations.empty()) return status;
  std::fprintf(stderr, "%s\n", violations.c_str());
  return 4;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 3;
}
