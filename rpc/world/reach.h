#pragma once

#include <memory>
#include <string>
#include <vector>

#include "stitch/rpc/agent/members.h"
#include "stitch/rpc/agent/peer_table.h"
#include "stitch/rpc/membership/member_card.h"
#include "stitch/rpc/options/options.h"
#include "stitch/rpc/world/member_record.h"
#include "stitch/transport/endpoint.h"
#include "stitch/transport/faults/faults.h"

namespace stitch::rpc {

// Where one worker can reach others. A plain value. Thread contract: any thread, once constructed.
class Reach {
 public:
  // `self` describes the worker; its name is final.
  Reach(const Options& options, MemberRecord self);

  // Whether a worker is reached over loopback: this one itself always, others of this process
  // unless the user names transports and loopback is not among them.
  [[nodiscard]] bool by_loopback(const MemberRecord& other) const;
  // A member as this worker sees it, with those of its addresses that can be reached. Throws
  // Error(protocol) for a card whose record makes no sense.
  [[nodiscard]] Member see(const MemberCard& card) const;

 private:
  MemberRecord self_;
  bool loopback_allowed_;
};

// The endpoints that a worker listens on; `others`: the members that it will meet, itself among
// them.
[[nodiscard]] std::vector<std::string> listen_where_needed(
    PeerTable& peers, transport::EndpointOptions endpoint_options, const Options& options,
    const std::vector<MemberRecord>& members, const MemberRecord& self,
    const std::shared_ptr<transport::Faults>& faults);

}  // namespace stitch::rpc
