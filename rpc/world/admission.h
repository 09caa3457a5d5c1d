#pragma once

#include <optional>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/rpc/membership/member_card.h"
#include "stitch/rpc/options/options.h"

namespace stitch::rpc {

// Why a running world of this size, with these live members, does not take `joiner`; nothing if it
// does. A former life of the joiner does not count. Pure. Thread contract: any thread.
[[nodiscard]] std::optional<Error> objection_to(const MemberCard& joiner,
                                                const std::vector<MemberCard>& live,
                                                const WorldSize& size);

}  // namespace stitch::rpc
