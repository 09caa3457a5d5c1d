#pragma once

#include "side.h"
#include "stitch/rpc/worker.h"

namespace stitch_bench {

// Makes this process a worker of the world of two, over the side's path, with one torch thread.
[[nodiscard]] stitch::Worker join_world(const Side& side);
// The other worker, by id: the fastest kind of target.
[[nodiscard]] inline stitch::WorkerId other(const Side& side) {
  return stitch::WorkerId(side.rank() == 0 ? 1 : 0);
}

// Rank 1 of most measures: serves until rank 0 has called finish().
void serve(Side& side);
void finish(const Side& side);

}  // namespace stitch_bench
