// Heap allocations per call, on the caller and on the callee.
#include <cstdint>

#include "allocation_counter.h"
#include "handlers.h"
#include "measure.h"
#include "timing.h"
#include "world.h"

namespace stitch_bench {

namespace allocs_measure {
namespace {

void start_there() { start_counting_allocations(); }
STITCH_INLINE(start_there);
std::uint64_t stop_there() { return stop_counting_allocations(); }
STITCH_INLINE(stop_there);

template <auto F>
void count_for(const Side& side, const std::string& handler) {
  constexpr int kCalls = 2000;
  for (int i = 0; i < kCalls; ++i) stitch::rpc_sync<F>(other(side));
  stitch::rpc_sync<&start_there>(other(side));
  start_counting_allocations();
  for (int i = 0; i < kCalls; ++i) stitch::rpc_sync<F>(other(side));
  const auto here = stop_counting_allocations();
  const auto there = stitch::rpc_sync<&stop_there>(other(side));
  const std::string key = "allocs." + side.path() + ".empty." + handler;
  side.result(key + ".client", static_cast<double>(here) / kCalls, "allocations");
  side.result(key + ".server", static_cast<double>(there) / kCalls, "allocations");
}

void first(Side& side) {
  const stitch::Worker self = join_world(side);
  count_for<&empty>(side, "pool");
  count_for<&empty_inline>(side, "inline");
  finish(side);
}

}  // namespace
}  // namespace allocs_measure

Measure allocs() {
  using namespace allocs_measure;
  return {
      .name = "allocs",
      .about =
          "heap allocations of an empty call, on the client and on the server, once all is warm",
      .quick = true,
      .paths = {"same_host", "tcp"},
      .first = &first,
      .second = &serve};
}

}  // namespace stitch_bench
