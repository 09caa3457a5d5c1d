#pragma once

#include <cstddef>
#include <cstdint>

#include "tests/simulation/kernel.h"

namespace stitch::dist_autograd::pass_simulation {

struct Options {
  std::size_t workers = 4;
  std::size_t nodes = 20;
  bool all_used = false;  // every link leads from a root
  int deaths = 0;
  int cuts = 0;              // connections between two live workers that break
  bool node_throws = false;  // one of the nodes that run
  bool root_aborts = false;  // at a random point: cancelled, or timed out
  double self_links = 0.0;   // how many links lead to the worker itself
  bool liar = false;         // one of the other workers names, as taking part, some that do not
};

// One backward pass over several workers: real PassProtocol objects, an imagined graph and an
// imagined strand per worker, and a network that delivers every message once, in any order. Effects
// are performed some time after they were decided, as on other threads. Workers die, connections
// between live workers break, nodes throw and the root gives up at random points. Workers learn of
// a loss at different times, and what a lost worker sent may arrive before that, after it, or
// never.
[[nodiscard]] simulation::Outcome run(std::uint64_t number, const Options& options);

}  // namespace stitch::dist_autograd::pass_simulation
