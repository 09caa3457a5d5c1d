#pragma once

#include "tests/rpc/membership_simulation.h"

namespace stitch::rpc::testing {

// What may happen in one history.
inline constexpr MembershipSimulation::Options kMembershipKinds[] = {
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

}  // namespace stitch::rpc::testing
