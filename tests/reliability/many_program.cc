// One of many workers, or a process that only uses libtorch ("alone"), for many_started_test.cc:
// prints what it has in memory of its own, and its share of all, in KiB.
#include <ATen/ATen.h>
#include <sys/resource.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <string>
#include <vector>

#include "stitch/stitch.h"

namespace {

int add_one(int value) { return value + 1; }

void print_memory() {
  std::ifstream file("/proc/self/smaps_rollup");
  std::int64_t own = 0, share = 0;
  for (std::string word; file >> word;) {
    std::int64_t kib = 0;
    if ((word == "Pss_Anon:" || word == "Pss_Shmem:") && file >> kib) own += kib;
    if (word == "Pss:" && file >> kib) share = kib;
  }
  std::printf("own %lld share %lld\n", static_cast<long long>(own), static_cast<long long>(share));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc > 1 && std::string(argv[1]) == "alone") {
    if (at::ones({4}).sum().item<double>() != 4) return 1;
    print_memory();
    return 0;
  }
  const rlimit few{1024, 1024};
  ::setrlimit(RLIMIT_NOFILE, &few);
  stitch::Options options;
  options.num_threads = 2;
  auto self = stitch::init(options);
  std::vector<stitch::Future<int>> calls;
  for (const auto& peer : self.workers())
    calls.push_back(self.rpc_async<add_one>(peer, self.rank()));
  for (auto& call : calls) {
    if (call.get() != self.rank() + 1) return 1;
  }
  self.barrier();
  print_memory();
  self.barrier();  // until then all are there
  self.shutdown();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 3;
}
