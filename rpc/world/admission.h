#pragma once

#include <optional>
#include <string>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/rpc/membership/notice.h"
#include "stitch/rpc/options/options.h"
#include "stitch/rpc/world/member_record.h"

namespace stitch::rpc {

// Name, id and epoch of a worker that joins a world which has had these lives: those of its name,
// with the epoch after the last one, else an id that no other worker has had. Throws why it has no
// place there; `where` is the store's name.
[[nodiscard]] WorkerInfo place_for(const MemberRecord& joiner, const std::vector<KnownLife>& lives,
                                   const WorldSize& size, const std::string& where);

// Why `joiner` cannot be a member of a world of this size whose other members are `live`; nothing
// if it can. A function of its arguments alone.
[[nodiscard]] std::optional<Error> objection_to(const MemberCard& joiner,
                                                const std::vector<MemberCard>& live,
                                                const WorldSize& size);

}  // namespace stitch::rpc
