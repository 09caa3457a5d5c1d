#pragma once

#include <cstdint>

#include "tests/simulation/kernel.h"

namespace stitch::rpc::membership_simulation {

// How often a fault happens in a history.
struct Options {
  int workers = 4;
  int deaths = 0;       // processes that are killed
  int restarts = 0;     // of those
  int stops = 0;        // processes that do not run for a while, long enough to be noticed
  int short_stops = 0;  // the same, too short for that
  int pauses = 0;       // the same, long enough for that, but over before it is declared dead
  int partitions = 0;   // a part of the workers cannot reach the others for a while
  int cuts = 0;         // one connection ends
  int blocks = 0;       // two workers, neither of them the first, cannot reach each other any more
  int joins = 0;
  int leaves = 0;
  int together = 0;    // so many leave at about the same time
  int duplicates = 0;  // a second worker starts under the name of a live one
  int isolations = 0;  // one worker is cut off from all others for a while, as by its network card
  int returns = 0;     // the worker that decides dies and comes back; two others lose each other
  int freezes = 0;     // processes that stop and never go on
  // Processes that are killed, or stop and never go on, before they can have connected to others:
  // right after the start, or after they have joined.
  int early = 0;
  int quiet = 0;     // not 0: no worker calls another
  int slow = 0;      // pairs of workers whose first connection takes long
  int failing = 0;   // pairs of workers whose first connection fails for a while
  int strained = 0;  // pairs where that takes long, and probes of the one by the other, too
};

// What may happen in one history.
inline constexpr Options kKinds[] = {
    {},
    {.deaths = 2},
    {.deaths = 2, .restarts = 2},
    {.stops = 2},
    {.short_stops = 3},
    {.partitions = 2},
    {.cuts = 3},
    {.blocks = 2},
    {.joins = 3},
    {.leaves = 2},
    {.cuts = 2, .joins = 2},
    {.deaths = 2, .restarts = 1, .cuts = 2, .joins = 2, .leaves = 1},
    {.duplicates = 2},
    {.deaths = 1, .stops = 2, .partitions = 1, .cuts = 1},
    {.deaths = 2, .restarts = 2, .joins = 2, .leaves = 2},
    {.pauses = 1},
    {.isolations = 1},
    {.cuts = 1},
    {.returns = 3},
    {.freezes = 1, .early = 2, .quiet = 1},
    {.joins = 3, .early = 2, .quiet = 1},
    {.deaths = 2, .restarts = 1, .joins = 2, .leaves = 1, .freezes = 1, .early = 1, .quiet = 1},
    {.cuts = 2, .joins = 2, .quiet = 1},
    {.cuts = 2, .slow = 4},
    {.freezes = 1, .quiet = 1, .slow = 4},
    {.together = 4},
    {.slow = 4},
    {.quiet = 1, .slow = 4},
    {.pauses = 1, .quiet = 1, .slow = 4},
    {.quiet = 1, .failing = 4},
    {.quiet = 1, .strained = 2},
    {.freezes = 1, .quiet = 1, .strained = 2},
};

// A history of one world: real MembershipProtocol objects over a simulated network and clock, with
// faults at random times.
[[nodiscard]] simulation::Outcome run(std::uint64_t number, const Options& options);

}  // namespace stitch::rpc::membership_simulation
