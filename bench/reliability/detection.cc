#include "detection.h"

#include <ATen/Parallel.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <random>
#include <stdexcept>
#include <thread>

#include "call_book.h"
#include "children.h"
#include "holds_within.h"
#include "remote_functions.h"
#include "shared_memory.h"
#include "stitch/rpc/worker.h"

namespace stitch_reliability {

namespace {

using namespace std::chrono_literals;

constexpr int kTrialWorkers = 3;
constexpr int kVictim = 2;
constexpr auto kPartitionAfter = 3s;  // after a worker starts, by STITCH_FAULT
constexpr auto kTrialLimit = 20s;

// What the processes of a trial tell each other; times are those of now_ns(), 0 before.
struct Trial {
  std::atomic<int> ready{0};
  std::atomic<std::int64_t> event{0};
  std::atomic<std::int64_t> failed{0};                 // worker 0's pending call
  std::atomic<bool> as_disconnected{false};            // it failed with
  std::array<std::atomic<std::int64_t>, 2> verdict{};  // was known to workers 0 and 1
};

struct Times {
  std::optional<double> failed, judged, told;  // ms after the event
};

int take_part_in_trial(int rank, const std::string& store, bool by_fault, Trial& trial) {
  at::set_num_threads(1);
  stitch::Options options;
  options.rank = rank;
  options.world_size = kTrialWorkers;
  options.init_method = "file://" + store;
  options.num_threads = 2;
  if (by_fault) {
    options.fault = "partition=worker2|worker0+worker1@" +
                    std::to_string(std::chrono::seconds(kPartitionAfter).count()) + "s";
    // The partition is complete when it has begun on all.
    const std::int64_t begins = now_ns() + std::chrono::nanoseconds(kPartitionAfter).count();
    std::int64_t latest = trial.event;
    while (latest < begins && !trial.event.compare_exchange_weak(latest, begins)) {
    }
  }
  auto self = stitch::init(std::move(options));
  const auto watch = self.on_leave([&](const stitch::WorkerInfo& info, stitch::LeaveReason reason) {
    if (info.id.value() == kVictim && reason == stitch::LeaveReason::dead && rank != kVictim)
      trial.verdict.at(static_cast<std::size_t>(rank)) = now_ns();
  });
  stitch::Future<void> pending;
  for (const auto& worker : self.workers())
    static_cast<void>(self.rpc_sync<answer>(worker, std::uint64_t{1}));
  if (rank == 0) {
    pending = self.rpc_async<wait_until_stopped>({.to = "worker2", .timeout = 60s});
    pending.on_ready([&trial, pending] {
      trial.as_disconnected =
          pending.has_error() && pending.error().code() == stitch::ErrorCode::disconnected;
      trial.failed = now_ns();
    });
  }
  ++trial.ready;
  std::this_thread::sleep_for(2min);  // the trial ends by killing all
  return 0;
}

void run_command(const std::string& command) {
  if (std::system(command.c_str()) != 0) throw std::runtime_error("command failed: " + command);
}

// One world, one event.
Times run_trial(const DetectionSettings& settings, const std::string& kind, std::uint64_t seed) {
  const RunFolder folder;
  SharedMemory<Trial> trial;
  const bool by_fault = kind == "partition" && settings.cut.empty();
  std::array<pid_t, kTrialWorkers> workers{};
  for (int rank = 0; rank < kTrialWorkers; ++rank) {
    const auto& spaces = settings.namespaces;
    workers[static_cast<std::size_t>(rank)] = start_process(
        [&, rank] { return take_part_in_trial(rank, folder.path() / "store", by_fault, *trial); },
        folder.path() / ("worker" + std::to_string(rank)),
        spaces.size() < 2 ? std::string() : spaces[rank == kVictim ? 1 : 0]);
  }
  const bool up = holds_within(kTrialLimit, [&] { return trial->ready == kTrialWorkers; });
  // At any point between two heartbeats.
  std::this_thread::sleep_for(300ms + std::chrono::milliseconds(seed * 7919 % 500));
  const pid_t victim = workers[kVictim];
  if (up && !by_fault) {
    trial->event = now_ns();
    if (kind == "partition") {
      run_command(settings.cut);
    } else {
      ::kill(victim, kind == "kill" ? SIGKILL : SIGSTOP);
    }
  }
  const bool verdict_expected = !by_fault;
  if (up) {
    static_cast<void>(holds_within(kTrialLimit, [&] {
      return trial->failed != 0 &&
             (!verdict_expected || (trial->verdict[0] != 0 && trial->verdict[1] != 0));
    }));
  }
  for (const pid_t each : workers) ::kill(each, SIGKILL);
  for (const pid_t each : workers) ::waitpid(each, nullptr, 0);
  if (kind == "partition" && !settings.restore.empty()) run_command(settings.restore);
  if (!up) {
    for (int rank = 0; rank < kTrialWorkers; ++rank)
      std::fputs(read_file(folder.path() / ("worker" + std::to_string(rank))).c_str(), stderr);
    throw std::runtime_error("the three workers did not meet within 20 s");
  }
  const auto after = [&](std::int64_t time) -> std::optional<double> {
    if (time == 0) return std::nullopt;
    return static_cast<double>(time - trial->event) / 1e6;
  };
  return {trial->as_disconnected ? after(trial->failed) : std::nullopt, after(trial->verdict[0]),
          after(trial->verdict[1])};
}

void print_times(const char* what, const std::vector<std::optional<double>>& all) {
  std::vector<double> times;
  for (const auto& each : all) {
    if (each) times.push_back(*each);
  }
  if (times.empty()) {
    std::printf("  %-42s %10s %10s %6zu of %zu\n", what, "-", "-", times.size(), all.size());
    return;
  }
  std::sort(times.begin(), times.end());
  std::printf("  %-42s %7.1f ms %7.1f ms %6zu of %zu\n", what, times[times.size() / 2],
              times.back(), times.size(), all.size());
}

}  // namespace

int measure_detection(const DetectionSettings& settings) {
  for (const auto& kind : settings.kinds) {
    if (kind != "kill" && kind != "stop" && kind != "partition")
      throw std::invalid_argument("kind \"" + kind +
                                  "\" is unknown; there are kill, stop, partition");
  }
  CallBook::make();  // answer() notes its numbers
  bool complete = true;
  std::printf("  %-42s %10s %10s %6s\n", "from the event until", "median", "worst", "seen");
  for (const auto& kind : settings.kinds) {
    std::vector<std::optional<double>> failed, judged, told;
    for (int i = 0; i < settings.trials; ++i) {
      const Times times = run_trial(settings, kind, static_cast<std::uint64_t>(i));
      failed.push_back(times.failed);
      judged.push_back(times.judged);
      told.push_back(times.told);
      complete = complete && times.failed.has_value();
    }
    print_times((kind + ": a pending call fails").c_str(), failed);
    print_times((kind + ": the verdict at worker 0, which judges").c_str(), judged);
    print_times((kind + ": the verdict at worker 1").c_str(), told);
    std::fflush(stdout);
  }
  return complete ? 0 : 1;
}

}  // namespace stitch_reliability
