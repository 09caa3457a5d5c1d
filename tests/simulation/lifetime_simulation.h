#pragma once

#include <cstddef>
#include <cstdint>

#include "tests/simulation/kernel.h"

namespace stitch::rref::lifetime_simulation {

struct Options {
  std::size_t workers = 4;
  std::size_t objects = 3;
  int steps = 400;
  std::size_t deaths = 0;    // at any step, of any life
  std::size_t restarts = 0;  // of workers that have died
  std::size_t chains = 0;    // of workers that lend on what they were lent; some of them die then
  std::size_t cuts = 0;      // pairs of living workers that lose each other for good
  bool late_news = false;    // some hear of a new life after it has begun to call others
};

// A random walk over the lifetime protocol: real Lifetime objects, a simulated network that delays
// ledger frames, which arrive in order, and delays and reorders calls, workers that die at any
// point, of which others hear at different times, and that come back in a new life. Every life
// of a worker is a worker of its own here, with its own number. At the end everything is delivered
// and dropped, and nothing may be left.
[[nodiscard]] simulation::Outcome run(std::uint64_t number, const Options& options);

}  // namespace stitch::rref::lifetime_simulation
