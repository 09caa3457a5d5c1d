// The time that a connected idle worker takes from a program that computes. Each process runs on
// one core, so that every other thread slows the computation down.
#include <cstdint>

#include "cores.h"
#include "handlers.h"
#include "measure.h"
#include "timing.h"
#include "world.h"

namespace stitch_bench {

namespace steal_measure {
namespace {

// A fixed amount of work in registers.
std::uint64_t mix(std::uint64_t value) {
  for (int i = 0; i < 10'000; ++i) {
    value ^= value << 13;
    value ^= value >> 7;
    value ^= value << 17;
  }
  return value;
}

// Computes on both sides at the same time; returns the calls of mix() per second here.
double work(const Side& side) {
  side.meet();
  const auto start = Clock::now();
  const auto end = after(3 * side.settings().seconds);
  std::uint64_t value = 1;
  double count = 0;
  do {
    value = mix(value);
    ++count;
  } while (Clock::now() < end);
  const double rate = count / seconds_since(start);
  side.meet();
  return value == 0 ? 0 : rate;  // never 0; the value has to be used
}

struct Rates {
  double alone = 0;
  double connected = 0;
};

Rates measure(const Side& side) {
  if (has_two_cores()) pin_to_core(side.rank());
  static_cast<void>(work(side));
  Rates rates;
  rates.alone = work(side);
  {
    const stitch::Worker self = join_world(side);
    if (side.rank() == 0) {
      for (int i = 0; i < 1000; ++i) stitch::rpc_sync<&empty>(other(side));
    }
    static_cast<void>(work(side));
    rates.connected = work(side);
  }
  rates.alone = (rates.alone + work(side)) / 2;
  return rates;
}

void first(Side& side) {
  const Rates here = measure(side);
  const double alone = here.alone + std::stod(side.receive_line());
  const double connected = here.connected + std::stod(side.receive_line());
  const std::string key = "steal." + side.path();
  side.result(key + ".alone", alone, "units/s");
  side.result(key + ".connected", connected, "units/s", key + ".alone");
  side.result(key + ".slowdown", 100 * (alone / connected - 1), "%");
}

void second(Side& side) {
  const Rates here = measure(side);
  side.send_line(std::to_string(here.alone));
  side.send_line(std::to_string(here.connected));
}

}  // namespace
}  // namespace steal_measure

Measure steal() {
  using namespace steal_measure;
  return {.name = "steal",
          .about =
              "two processes computing, without stitch and as connected idle workers: how much "
              "slower in %",
          .paths = {"same_host", "tcp"},
          .first = &first,
          .second = &second};
}

}  // namespace stitch_bench
