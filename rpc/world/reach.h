#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stitch/rpc/membership/member_card.h"
#include "stitch/rpc/options/options.h"
#include "stitch/rpc/peers/members.h"
#include "stitch/rpc/peers/peer_table.h"
#include "stitch/rpc/world/member_record.h"
#include "stitch/transport/endpoint.h"
#include "stitch/transport/faults/faults.h"

namespace stitch::rpc {

// Where one worker can reach others. A plain value. Thread contract: any thread, once constructed.
class Reach {
 public:
  // `self` describes the worker; its name is final.
  explicit Reach(MemberRecord self) : self_(std::move(self)) {}

  // A member as this worker sees it, with those of its addresses that can be reached. Throws
  // Error(protocol) for a card whose record makes no sense.
  [[nodiscard]] Member see(const MemberCard& card) const;

 private:
  MemberRecord self_;
};

// What all of these workers have in common.
enum class Distance : std::uint8_t { process, memory, host, network };
[[nodiscard]] Distance distance_of(const std::vector<MemberRecord>& members);
// Those of a worker's addresses that a world of these members needs: any user of a host can connect
// to a port. In an elastic world others may come.
[[nodiscard]] std::vector<std::string> needed_addresses(std::vector<std::string> addresses,
                                                        const std::vector<MemberRecord>& members,
                                                        const WorldSize& size);

// The endpoints of a worker, which has bound their addresses before it knows its world: an address
// of the network only where there is a secret, or STITCH_INSECURE. Lives within join_world().
class BoundEndpoints {
 public:
  // Errors as init().
  BoundEndpoints(const Options& options, const MemberRecord& self,
                 transport::EndpointOptions endpoint_options);

  [[nodiscard]] const std::vector<std::string>& addresses() const noexcept { return addresses_; }
  // Throws why this worker has no address that a world of this distance needs.
  void check(Distance distance) const;
  // It is `self`: listens at those of `addresses` that it has bound, and closes the others.
  void listen(PeerTable& peers, const transport::Hello& self,
              const std::vector<std::string>& addresses,
              const std::shared_ptr<transport::Faults>& faults);

 private:
  void bind_outside(const Options& options, transport::EndpointOptions endpoint_options);

  std::vector<std::unique_ptr<transport::Endpoint>> endpoints_;
  std::vector<std::vector<std::string>> bound_;  // of each
  std::vector<std::string> addresses_;
  std::optional<Error> only_process_;  // why other processes cannot reach it
  std::optional<Error> only_host_;     // why other hosts cannot
};

}  // namespace stitch::rpc
