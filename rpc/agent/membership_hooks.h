#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "stitch/base/error.h"
#include "stitch/rpc/membership/notice.h"
#include "stitch/rpc/peers/members.h"

namespace stitch::rpc {

// What the rendezvous tells an agent about its world, and knows about the cards of its members. A
// plain value; the functions are called on any thread, `admit` under a lock.
struct MembershipHooks {
  MemberCard self;
  std::vector<KnownLife> lives;  // as they are known at the start; may have `self` among them
  // The member as this worker uses it: addresses within reach, devices. May throw what makes the
  // card useless. Null: the addresses of the card, and no devices.
  std::function<Member(const MemberCard&)> see{};
  // Why `joiner` cannot be a member beside `live`; nothing if it can. Pure. Null: it can.
  std::function<std::optional<Error>(const MemberCard& joiner, const std::vector<MemberCard>& live)>
      admit{};
};

}  // namespace stitch::rpc
