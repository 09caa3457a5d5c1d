#include "stitch/rpc/world/reach.h"

#include <algorithm>
#include <utility>

#include "stitch/rpc/options/launcher.h"
#include "stitch/rpc/options/security_options.h"
#include "stitch/rpc/world/open_store.h"
#include "stitch/transport/selection/interfaces.h"
#include "stitch/transport/selection/make_endpoints.h"

namespace stitch::rpc {

namespace {

// Whether all workers can meet in shared memory and prefer it. Any user of this host could connect
// to a port, so there is none then. In an elastic world others may come that cannot.
bool memory_is_enough(const Options& options, const std::vector<MemberRecord>& members,
                      const MemberRecord& self) {
  return !options.world_size.is_elastic() && !self.memory.empty() &&
         std::all_of(members.begin(), members.end(), [&](const MemberRecord& member) {
           return member.memory == self.memory && member.prefers_memory;
         });
}

// Whether workers of an elastic world may come from other hosts: where they can reach its store.
bool strangers_may_come(const Options& options) {
  if (!options.world_size.is_elastic() || options.store) return false;
  const auto place = parse_tcp_method(options.init_method);
  return place && place->host != "127.0.0.1" && place->host != "localhost" && place->host != "::1";
}

transport::TransportChoice choose_transports(const Options& options,
                                             const std::vector<MemberRecord>& members,
                                             const MemberRecord& self, bool memory_only) {
  transport::TransportChoice choice;
  if (!options.transports.empty()) choice.transports = options.transports;
  std::erase(choice.transports, kLoopback);
  if (!options.channels.empty()) choice.channels = options.channels;
  if (memory_only) {
    choice.transports = {kSharedMemory};
    return choice;
  }
  const bool other_hosts =
      strangers_may_come(options) ||
      std::any_of(members.begin(), members.end(),
                  [&](const MemberRecord& member) { return member.host != self.host; });
  const auto wanted = transport::wanted_interfaces_from_environment();
  try {
    choice.bind_address =
        transport::choose_address(transport::list_interfaces(), wanted.names, !other_hosts);
  } catch (const Error& error) {
    throw wanted.variable.empty() ? error : error.with_prefix(wanted.variable);
  }
  return choice;
}

}  // namespace

Reach::Reach(const Options& options, MemberRecord self)
    : self_(std::move(self)),
      loopback_allowed_(options.transports.empty() ||
                        std::find(options.transports.begin(), options.transports.end(),
                                  kLoopback) != options.transports.end()) {}

bool Reach::by_loopback(const MemberRecord& other) const {
  return other.process == self_.process && (loopback_allowed_ || other.name == self_.name);
}

Member Reach::see(const MemberCard& card) const {
  const MemberRecord record = MemberRecord::decode(card.record);
  const bool near = by_loopback(record);
  Member member{card.info, {}, record.devices, on_same_host(self_, record), record.limits};
  for (const auto& address : card.addresses) {
    const bool usable =
        address.starts_with("loopback:") ? near : !near && within_reach(address, self_, record);
    if (usable) member.addresses.push_back(address);
  }
  return member;
}

std::vector<std::string> listen_where_needed(PeerTable& peers,
                                             transport::EndpointOptions endpoint_options,
                                             const Options& options,
                                             const std::vector<MemberRecord>& members,
                                             const MemberRecord& self,
                                             const std::shared_ptr<transport::Faults>& faults) {
  std::vector<std::string> addresses;
  const bool memory_only = memory_is_enough(options, members, self);
  auto choice = choose_transports(options, members, self, memory_only);
  // The user names loopback alone: no worker of another process can join.
  if (choice.transports.empty() && options.world_size.is_elastic()) return addresses;
  if (!memory_only) {
    check_open_network(options.name, endpoint_options.secret != nullptr, choice.bind_address);
    check_tensorpipe_address(choice.transports, choice.bind_address);
  }
  endpoint_options.refuse_own_id = true;  // calls to oneself stay in the process
  for (auto& endpoint : transport::make_endpoints(endpoint_options, choice)) {
    for (auto& address : peers.listen(with_faults(std::move(endpoint), faults)))
      addresses.push_back(std::move(address));
  }
  return addresses;
}

}  // namespace stitch::rpc
