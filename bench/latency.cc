// One call at a time, each timed alone.
#include <ATen/ATen.h>

#include <stdexcept>

#include "handlers.h"
#include "measure.h"
#include "timing.h"
#include "world.h"

namespace stitch_bench {

namespace latency_measure {
namespace {

template <auto Add>
void time_adds(const Side& side, const std::string& key, const std::string& floor) {
  const auto a = at::arange(8, at::kFloat);
  const auto b = at::ones({8});
  if (!at::equal(stitch::rpc_sync<Add>(other(side), a, b), a + b))
    throw std::runtime_error("the sum that came back is wrong");
  report_latency(side, key,
                 time_each_us(side.settings().seconds, 20,
                              [&] { static_cast<void>(stitch::rpc_sync<Add>(other(side), a, b)); }),
                 floor);
}

template <auto Empty>
void time_empty_calls(const Side& side, const std::string& key, const std::string& floor) {
  report_latency(
      side, key,
      time_each_us(side.settings().seconds, 20, [&] { stitch::rpc_sync<Empty>(other(side)); }),
      floor);
}

void first(Side& side) {
  const stitch::Worker self = join_world(side);
  const std::string key = "latency." + side.path();
  const std::string floor = side.floor("tensorpipe.shm.rtt64", "tcp.rtt64");
  time_empty_calls<&empty>(side, key + ".empty.pool", floor);
  time_empty_calls<&empty_inline>(side, key + ".empty.inline", floor);
  time_adds<&add>(side, key + ".add8.pool", floor);
  time_adds<&add_inline>(side, key + ".add8.inline", floor);
  finish(side);
}

}  // namespace
}  // namespace latency_measure

Measure latency() {
  using namespace latency_measure;
  return {.name = "latency",
          .about =
              "one call at a time: empty, and the sum of two tensors of 8 floats; on the pool and "
              "inline",
          .quick = true,
          .paths = {"same_host", "tcp"},
          .floors = {"floor-sockets", "floor-tensorpipe-latency"},
          .first = &first,
          .second = &serve};
}

}  // namespace stitch_bench
