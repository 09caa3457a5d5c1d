#include "neighbours.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "call_book.h"
#include "children.h"
#include "holds_within.h"
#include "raw_peers.h"
#include "remote_functions.h"
#include "shared_memory.h"
#include "stitch/rpc/worker.h"

namespace stitch_reliability {

namespace {

using namespace std::chrono_literals;

constexpr int kNeighbours = 3;  // 0 is called and has the connections, 1 calls, 2 reads nothing
constexpr int kUnread = 256;    // messages of 1 MiB that are sent to it
constexpr auto kNeighbourLimit = 60s;

struct Measured {
  std::atomic<std::uint64_t> calls{0};
  std::atomic<std::uint64_t> failed{0};
  std::atomic<double> p50{0}, p99{0}, worst{0};  // microseconds
};

struct NeighbourState {
  std::atomic<int> port{0};
  std::atomic<int> ready{0};
  std::atomic<bool> flood{false};  // asked of worker 0
  std::atomic<bool> flooded{false};
  std::atomic<int> measure{0};  // asked of worker 1
  std::atomic<int> measured{0};
  std::array<Measured, 2> results;
};

void swallow(at::Tensor) {}

// Until `condition` holds; throws when it takes too long.
template <class Condition>
void wait_until(const char* what, Condition condition) {
  if (!holds_within(kNeighbourLimit, std::move(condition)))
    throw std::runtime_error(std::string("waited for 60 s until ") + what);
}

void measure(stitch::Worker& self, double seconds, Measured& result) {
  std::vector<double> times;
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(seconds));
  while (Clock::now() < end) {
    const auto start = Clock::now();
    try {
      self.rpc_sync<answer>({.to = "worker0", .timeout = 5s}, std::uint64_t{1});
      ++result.calls;
    } catch (const stitch::Error& error) {
      std::fprintf(stderr, "stitch-reliability: %s\n", error.what());
      ++result.failed;
    }
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  std::sort(times.begin(), times.end());
  result.p50 = times[times.size() / 2];
  result.p99 = times[times.size() * 99 / 100];
  result.worst = times.back();
}

// Without an end: the program kills it.
[[noreturn]] void be_neighbour(int rank, const std::string& store, double seconds,
                               NeighbourState& shared) {
  at::set_num_threads(1);
  stitch::Options options;
  options.rank = rank;
  options.world_size = kNeighbours;
  options.init_method = "file://" + store;
  options.transports = {"tcp"};
  options.num_threads = 2;
  options.heartbeat_timeout = 10min;  // the one that reads nothing stays a member
  auto self = stitch::init(std::move(options));
  for (const auto& worker : self.workers())
    static_cast<void>(self.rpc_sync<answer>(worker, std::uint64_t{1}));
  if (rank == 0) shared.port = listening_ports().at(0);
  ++shared.ready;
  for (int done = 0;; std::this_thread::sleep_for(10ms)) {
    if (rank == 0 && shared.flood && !shared.flooded) {
      const auto mib = at::ones({1 << 18});
      for (int i = 0; i < kUnread; ++i) self.notify<swallow>("worker2", mib);
      shared.flooded = true;
    }
    if (rank == 1 && shared.measure > done) {
      measure(self, seconds, shared.results.at(static_cast<std::size_t>(done)));
      shared.measured = ++done;
    }
  }
}

void print_calls(const char* what, const Measured& result) {
  std::printf("  %-44s %9llu %7llu %9.1f us %9.1f us %9.1f ms\n", what,
              static_cast<unsigned long long>(result.calls),
              static_cast<unsigned long long>(result.failed), result.p50.load(), result.p99.load(),
              result.worst / 1000);
}

}  // namespace

int measure_neighbours(const NeighbourSettings& settings) {
  // The connections take a descriptor each in this process and in worker 0.
  constexpr std::size_t kOwnDescriptors = 200;
  const std::size_t limit = raise_file_limit();
  std::size_t wanted = settings.connections;
  if (wanted + kOwnDescriptors > limit) {
    wanted = limit > kOwnDescriptors ? limit - kOwnDescriptors : 0;
    std::printf("%zu connections instead of %zu: the limit of open files is %zu\n", wanted,
                settings.connections, limit);
  }
  CallBook::make();  // answer() notes its numbers
  const RunFolder folder;
  SharedMemory<NeighbourState> shared;
  std::array<pid_t, kNeighbours> workers{};
  for (int rank = 0; rank < kNeighbours; ++rank) {
    workers.at(static_cast<std::size_t>(rank)) = start_process(
        [&, rank]() -> int {
          be_neighbour(rank, folder.path() / "store", settings.seconds, *shared);
        },
        folder.path() / ("worker" + std::to_string(rank)), "");
  }
  int status = 0;
  try {
    wait_until("the workers have met", [&] { return shared->ready == kNeighbours; });
    shared->measure = 1;
    wait_until("calls are measured", [&] { return shared->measured == 1; });
    ::kill(workers[2], SIGSTOP);
    shared->flood = true;
    wait_until("the peer that reads nothing is sent to", [&] { return shared->flooded.load(); });
    RawPeers peers(static_cast<std::uint16_t>(shared->port.load()));
    std::size_t open = peers.keep(wanted);
    shared->measure = 2;
    const auto end =
        Clock::now() + kNeighbourLimit + std::chrono::seconds(static_cast<long>(settings.seconds));
    while (shared->measured < 2) {
      if (Clock::now() > end) throw std::runtime_error("the calls of a neighbour have stopped");
      std::this_thread::sleep_for(10ms);
      open = std::min(open, peers.keep(wanted));
    }
    std::printf("  %-44s %9s %7s %12s %12s %12s\n", "calls over TCP", "answered", "failed", "p50",
                "p99", "worst");
    print_calls("alone", shared->results[0]);
    print_calls((std::to_string(wanted) + " half-open, one that reads nothing").c_str(),
                shared->results[1]);
    std::printf(
        "  half-open connections at any time: at least %zu; closed by the worker and opened "
        "again: %zu\n",
        open, peers.closed());
    for (const Measured& result : shared->results)
      status = result.calls == 0 || result.failed != 0 || open < wanted ? 1 : status;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "stitch-reliability: %s\n", error.what());
    status = 1;
  }
  for (const pid_t each : workers) ::kill(each, SIGKILL);
  for (const pid_t each : workers) ::waitpid(each, nullptr, 0);
  for (int rank = 0; status != 0 && rank < kNeighbours; ++rank)
    std::fputs(read_file(folder.path() / ("worker" + std::to_string(rank))).c_str(), stderr);
  return status;
}

}  // namespace stitch_reliability
