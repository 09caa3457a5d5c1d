#include "chaos_worker.h"

#include <ATen/Parallel.h>

#include <cstdio>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

namespace stitch_reliability {

namespace {

using namespace std::chrono_literals;

constexpr auto kCallTimeout = 5s;                         // of what has no limit of its own
constexpr auto kReclaimTimeout = 20s;                     // the traffic of others ends meanwhile
constexpr auto kShutdownTimeout = kReclaimTimeout + 25s;  // others may only then be done
constexpr auto kLookInterval = 200ms;                     // at its own counters
constexpr auto kSettled = 3s;  // after init(), before memory is looked at

std::optional<stitch::Worker> join(const WorkerSettings& settings) {
  at::set_num_threads(1);
  stitch::Options options;
  options.name = "worker" + std::to_string(settings.rank);
  options.rank = settings.rank;
  options.world_size = settings.workers;
  options.init_method = "file://" + settings.store;
  options.rpc_timeout = kCallTimeout;
  options.init_timeout = 40s;
  options.num_threads = 4;
  options.fault = settings.fault;
  try {
    return stitch::init(std::move(options));
  } catch (const stitch::Error& error) {
    std::fprintf(stderr, "stitch-reliability: init: %s\n", error.what());
    return std::nullopt;
  }
}

// Serves until all workers have forgotten what they referred to, and notes what is left here.
void wait_until_reclaimed(const stitch::Worker& self, Life& life) {
  const auto until = Clock::now() + kReclaimTimeout;
  do {
    std::this_thread::sleep_for(50ms);  // nothing tells when others have reclaimed: it polls
    const auto numbers = self.debug_info();
    life.objects_left = numbers.at("rref.entries");
    life.contexts_left = numbers.at("dist_autograd.contexts");
  } while ((life.objects_left != 0 || life.contexts_left != 0) && Clock::now() < until);
  if (life.objects_left == 0 && life.contexts_left == 0) return;
  std::fprintf(stderr, "stitch-reliability: what is left:");
  for (const auto& [name, number] : self.debug_info()) {
    if (number != 0 && (name.starts_with("rref.") || name.starts_with("dist_autograd.")))
      std::fprintf(stderr, " %s %lld", name.c_str(), static_cast<long long>(number));
  }
  std::fprintf(stderr, "\n");
}

void note_connections(const stitch::Worker& self, Life& life) {
  life.connections_replaced = self.debug_info().at("rpc.reconnects");
}

// Until the run is over or this life is of no use.
void serve(const stitch::Worker& self, const Links& links, Life& life) {
  const auto start = Clock::now();
  auto next_look = start;
  while (!book().over && !links.useless()) {
    std::this_thread::sleep_for(20ms);  // polls memory that other processes write
    if (Clock::now() >= next_look) {
      next_look = Clock::now() + kLookInterval;
      note_connections(self, life);
    }
    if (life.kib_at_start == 0 && Clock::now() > start + kSettled) life.kib_at_start = own_kib();
  }
}

}  // namespace

int live(const WorkerSettings& settings) {
  Life& life = book().lives.at(static_cast<std::size_t>(settings.life));
  auto joined = join(settings);
  if (!joined) {
    life.end = End::no_start;
    return kNotJoined;
  }
  stitch::Worker& self = *joined;
  book().up.at(static_cast<std::size_t>(settings.rank)) = now_ns();
  Links links(self);
  std::atomic<bool> stop{false};
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < settings.threads; ++thread) {
      threads.emplace_back(
          [&, thread] { Traffic(self, settings.traffic, settings.life, thread, links).run(stop); });
    }
    serve(self, links, life);
    stop = true;
  }
  note_connections(self, life);
  life.kib_at_end = own_kib();
  Waiting& waiting =
      book().waiting.at(static_cast<std::size_t>(settings.rank)).at(CallBook::kMaxThreads - 1);
  forget_kept();
  if (!book().over) {
    const WaitScope waits(waiting, WaitScope::kShutdown, kShutdownTimeout + 1s);
    life.end = End::fenced;
    self.shutdown({.graceful = false, .timeout = kShutdownTimeout});
    return kLeft;
  }
  wait_until_reclaimed(self, life);
  const WaitScope waits(waiting, WaitScope::kShutdown, kShutdownTimeout + 1s);
  life.end = End::itself;
  try {
    self.shutdown({.wait = kShutdownTimeout / 2, .timeout = kShutdownTimeout / 2});
    life.left_gracefully = true;
  } catch (const stitch::Error& error) {
    std::fprintf(stderr, "stitch-reliability: shutdown: %s\n", error.what());
  }
  return kFinished;
}

}  // namespace stitch_reliability
