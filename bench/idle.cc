// The cost of a connected idle worker: CPU time, threads, memory.
#include <ATen/ATen.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "handlers.h"
#include "measure.h"
#include "process_usage.h"
#include "stitch/rpc/future/future.h"
#include "timing.h"
#include "world.h"

namespace stitch_bench {

namespace idle_measure {
namespace {

// The same work as in the process that only loads libtorch.
void make_one_tensor() { static_cast<void>(at::ones({8})); }

double resident_with_a_tensor() {
  make_one_tensor();
  return resident_mib();
}
int threads_there() { return thread_count(); }
double cpu_there(double seconds) { return cpu_percent_while_asleep(seconds); }

// Memory, also relative to a process that only loads libtorch where that is known.
void report_memory(const Side& side, const std::string& key, double mib) {
  side.result(key, mib, "MiB", "memory.libtorch_only");
  if (side.base_rss_mib() > 0)
    side.result(key + "_above_libtorch", mib - side.base_rss_mib(), "MiB");
}

void make_traffic(const Side& side) {
  const auto tensor =
      at::ones({static_cast<std::int64_t>(side.settings().sizes_mib.front()) << 20}, at::kByte);
  const auto end = after(side.settings().seconds);
  do {
    std::vector<stitch::Future<void>> calls;
    for (int i = 0; i < 256; ++i) calls.push_back(stitch::rpc_async<&empty>(other(side)));
    for (auto& call : calls) call.get();
    static_cast<void>(stitch::rpc_sync<&echo>(other(side), tensor));
  } while (Clock::now() < end);
}

void first(Side& side) {
  const stitch::Worker self = join_world(side);
  const std::string client = "idle." + side.path() + ".client.";
  const std::string server = "idle." + side.path() + ".server.";
  report_memory(side, client + "memory_after_init", resident_with_a_tensor());
  report_memory(side, server + "memory_after_init",
                stitch::rpc_sync<&resident_with_a_tensor>(other(side)));
  make_traffic(side);

  // Threads that busy-poll before they sleep are asleep by then.
  std::this_thread::sleep_for(
      std::chrono::duration<double>(std::min(0.5, side.settings().seconds)));
  const double idle_seconds = 10 * side.settings().seconds;
  const auto there = stitch::rpc_async<&cpu_there>(
      {.to = other(side), .timeout = std::chrono::seconds(0)}, idle_seconds);
  const double here = cpu_percent_while_asleep(idle_seconds);
  side.result(client + "cpu", here, "%");
  side.result(server + "cpu", there.get(), "%");
  side.result(client + "threads", thread_count(), "threads");
  side.result(server + "threads", stitch::rpc_sync<&threads_there>(other(side)), "threads");
  report_memory(side, client + "memory_after_traffic", resident_mib());
  report_memory(side, server + "memory_after_traffic",
                stitch::rpc_sync<&resident_with_a_tensor>(other(side)));
  finish(side);
}

void first_alone(Side& side) {
  make_one_tensor();
  side.result("memory.libtorch_only", resident_mib(), "MiB");
}

}  // namespace
}  // namespace idle_measure

Measure memory_base() {
  using namespace idle_measure;
  return {.name = "floor-memory",
          .about = "memory of a process that only loads libtorch and makes one tensor",
          .first = &first_alone};
}

Measure idle() {
  using namespace idle_measure;
  return {.name = "idle",
          .about =
              "processor time, threads and memory of two connected workers that do nothing, for 10 "
              "times --seconds, after traffic",
          .paths = {"same_host", "tcp"},
          .floors = {"floor-memory"},
          .first = &first,
          .second = &serve};
}

}  // namespace stitch_bench
