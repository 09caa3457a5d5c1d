#include "stitch/rpc/world/reach.h"

#include <algorithm>
#include <utility>

#include "stitch/rpc/options/launcher.h"
#include "stitch/rpc/options/security_options.h"
#include "stitch/rpc/world/open_store.h"
#include "stitch/transport/loopback/loopback_endpoint.h"
#include "stitch/transport/selection/interfaces.h"
#include "stitch/transport/selection/make_endpoints.h"

namespace stitch::rpc {

namespace {

std::string scheme_of_address(const std::string& address) {
  return address.substr(0, address.find(':'));
}

// Whether workers of an elastic world may come from other hosts: where they can reach its store.
bool strangers_may_come(const Options& options) {
  if (!options.world_size.is_elastic() || options.store) return false;
  const auto place = parse_tcp_method(options.init_method);
  return place && place->host != "127.0.0.1" && place->host != "localhost" && place->host != "::1";
}

bool has_tensorpipe(const std::vector<std::string>& transports) {
  return std::ranges::any_of(
      transports, [](const auto& name) { return name == "uv" || name == "tensorpipe-shm"; });
}

// The address for this host, or for others.
std::string chosen_address(bool within_host) {
  const auto wanted = transport::wanted_interfaces_from_environment();
  try {
    return transport::choose_address(transport::list_interfaces(), wanted.names, within_host);
  } catch (const Error& error) {
    throw wanted.variable.empty() ? error : error.with_prefix(wanted.variable);
  }
}

}  // namespace

Member Reach::see(const MemberCard& card) const {
  const MemberRecord record = MemberRecord::decode(card.record);
  const bool near =
      record.process == self_.process && (self_.uses_loopback || record.token == self_.token);
  Member member{card.info, {}, record.devices, on_same_host(self_, record), record.limits};
  for (const auto& address : card.addresses) {
    const bool usable =
        address.starts_with("loopback:") ? near : !near && within_reach(address, self_, record);
    if (usable) member.addresses.push_back(address);
  }
  return member;
}

Distance distance_of(const std::vector<MemberRecord>& members) {
  if (members.size() < 2) return Distance::process;
  const MemberRecord& first = members.front();
  const auto all = [&](const auto& fits) { return std::ranges::all_of(members, fits); };
  if (all([&](const MemberRecord& each) {
        return each.process == first.process && each.uses_loopback;
      }))
    return Distance::process;
  if (!first.memory.empty() && all([&](const MemberRecord& each) {
        return each.memory == first.memory && each.prefers_memory;
      }))
    return Distance::memory;
  const bool one_host = all([&](const MemberRecord& each) { return each.host == first.host; });
  return one_host ? Distance::host : Distance::network;
}

std::vector<std::string> needed_addresses(std::vector<std::string> addresses,
                                          const std::vector<MemberRecord>& members,
                                          const WorldSize& size) {
  if (size.is_elastic()) return addresses;
  const Distance distance = distance_of(members);
  const auto within_host = [all = addresses](const std::string& scheme) {
    return std::ranges::any_of(all, [&](const auto& each) {
      return scheme_of_address(each) == scheme && is_host_address(each);
    });
  };
  std::erase_if(addresses, [&](const std::string& address) {
    const std::string scheme = scheme_of_address(address);
    if (scheme == kLoopback || distance == Distance::network) return false;
    if (distance == Distance::process) return true;
    if (distance == Distance::memory) return scheme != kSharedMemory;
    return !is_host_address(address) && within_host(scheme);
  });
  return addresses;
}

BoundEndpoints::BoundEndpoints(const Options& options, const MemberRecord& self,
                               transport::EndpointOptions endpoint_options) {
  endpoints_.push_back(transport::make_loopback_endpoint(
      endpoint_options, transport::LoopbackNetwork::process_wide()));
  if (options.world_size != 1) bind_outside(options, std::move(endpoint_options));
  for (const auto& endpoint : endpoints_) {
    bound_.emplace_back();
    auto failure = base::failure_of([&] { bound_.back() = endpoint->bind(); });
    if (failure && !only_process_) only_process_ = std::move(failure);
    addresses_.insert(addresses_.end(), bound_.back().begin(), bound_.back().end());
  }
}

void BoundEndpoints::bind_outside(const Options& options,
                                  transport::EndpointOptions endpoint_options) {
  endpoint_options.refuse_own_id = true;  // calls to oneself stay in the process
  transport::TransportChoice choice;
  if (!options.transports.empty()) choice.transports = options.transports;
  std::erase(choice.transports, kLoopback);
  if (!options.channels.empty()) choice.channels = options.channels;
  // The user names loopback alone: no worker of another process can join.
  if (choice.transports.empty() && options.world_size.is_elastic()) return;
  // It will listen in any case, so an interface that is not there is an error at once.
  if (options.world_size.is_elastic()) static_cast<void>(chosen_address(true));
  only_host_ = base::failure_of([&] {
    const std::string outside = chosen_address(false);
    check_open_network(options.name, endpoint_options.secret != nullptr, outside);
    check_tensorpipe_address(choice.transports, outside);
    choice.bind_address = chosen_address(true);
    if (has_tensorpipe(choice.transports)) {
      choice.bind_address = outside;
    } else if (choice.bind_address != outside) {
      choice.more_addresses.push_back(outside);
    }
  });
  if (only_host_ && strangers_may_come(options)) throw Error(*only_host_);
  only_process_ = base::failure_of([&] {
    for (auto& each : transport::make_endpoints(endpoint_options, choice))
      endpoints_.push_back(std::move(each));
  });
}

void BoundEndpoints::check(Distance distance) const {
  if (distance > Distance::process && only_process_) throw Error(*only_process_);
  if (distance == Distance::network && only_host_) throw Error(*only_host_);
}

void BoundEndpoints::listen(PeerTable& peers, const transport::Hello& self,
                            const std::vector<std::string>& addresses,
                            const std::shared_ptr<transport::Faults>& faults) {
  for (std::size_t i = 0; i < endpoints_.size(); ++i) {
    const bool needed = std::ranges::any_of(bound_[i], [&](const auto& address) {
      return std::ranges::find(addresses, address) != addresses.end();
    });
    if (!needed) continue;
    endpoints_[i]->become(self, addresses);
    static_cast<void>(peers.listen(with_faults(std::move(endpoints_[i]), faults)));
  }
  endpoints_.clear();
}

}  // namespace stitch::rpc
