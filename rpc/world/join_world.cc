#include "stitch/rpc/world/join_world.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/event_loop.h"
#include "stitch/rpc/options/security_options.h"
#include "stitch/rpc/world/member_record.h"
#include "stitch/rpc/world/open_store.h"
#include "stitch/rpc/world/rendezvous.h"
#include "stitch/transport/faults/faults.h"
#include "stitch/transport/loopback/loopback_endpoint.h"
#include "stitch/transport/selection/interfaces.h"
#include "stitch/transport/selection/make_endpoints.h"
#include "stitch/transport/store/prefix_store.h"
#include "stitch/transport/trimmed_pool.h"
#include "stitch/transport/wire/secret_key.h"

namespace stitch::rpc {

namespace {

constexpr const char* kLoopback = "loopback";
constexpr const char* kSharedMemory = "shm";

using MemberRecords = std::vector<MemberRecord>;

// Which workers are reached over loopback: this one itself always, others of this process unless
// the user names transports and loopback is not among them.
class LoopbackRule {
 public:
  LoopbackRule(const Options& options, const MemberRecord& self)
      : self_(self),
        allowed_(options.transports.empty() ||
                 std::find(options.transports.begin(), options.transports.end(), kLoopback) !=
                     options.transports.end()) {}
  [[nodiscard]] bool operator()(const MemberRecord& other) const {
    return other.process == self_.process && (allowed_ || other.rank == self_.rank);
  }

 private:
  const MemberRecord& self_;
  const bool allowed_;
};

// Whether all workers can meet in shared memory and prefer it. Any user of this host could connect
// to a port, so there is none then.
bool memory_is_enough(const MemberRecords& members, const MemberRecord& self) {
  return !self.memory.empty() &&
         std::all_of(members.begin(), members.end(), [&](const MemberRecord& member) {
           return member.memory == self.memory && member.prefers_memory;
         });
}

transport::TransportChoice choose_transports(const Options& options, const MemberRecords& members,
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
      std::any_of(members.begin(), members.end(),
                  [&](const MemberRecord& member) { return member.host != self.host; });
  const auto wanted = transport::wanted_interfaces_from_environment();
  choice.bind_address =
      transport::choose_address(transport::list_interfaces(), wanted, !other_hosts);
  return choice;
}

// Listens only where some worker will connect from. Appends the addresses to advertise.
void listen(PeerTable& peers, transport::EndpointOptions endpoint_options, const Options& options,
            const MemberRecords& members, const MemberRecord& self,
            const std::shared_ptr<transport::Faults>& faults, std::vector<std::string>& addresses) {
  const bool memory_only = memory_is_enough(members, self);
  auto choice = choose_transports(options, members, self, memory_only);
  if (!memory_only) {
    check_open_network(options.name, endpoint_options.secret != nullptr, choice.bind_address);
    check_tensorpipe_address(choice.transports, choice.bind_address);
  }
  endpoint_options.refuse_own_id = true;  // calls to oneself stay in the process
  for (auto& endpoint : transport::make_endpoints(endpoint_options, choice)) {
    for (auto& address : peers.listen(with_faults(std::move(endpoint), faults)))
      addresses.push_back(std::move(address));
  }
}

// The members as the agent knows them, each with those of its addresses that `self` can reach.
std::vector<Member> known_members(const MemberRecords& records, const MemberRecord& self,
                                  const std::vector<std::vector<std::string>>& addresses,
                                  const LoopbackRule& by_loopback) {
  std::vector<Member> members;
  for (std::size_t i = 0; i < records.size(); ++i) {
    const MemberRecord& record = records[i];
    Member member{
        {record.name, WorkerId(static_cast<std::uint32_t>(i)), record.epoch}, {}, record.devices};
    for (const auto& address : addresses[i]) {
      const bool usable = address.starts_with("loopback:")
                              ? by_loopback(record)
                              : !by_loopback(record) && within_reach(address, self, record);
      if (usable) member.addresses.push_back(address);
    }
    members.push_back(std::move(member));
  }
  return members;
}

}  // namespace

std::shared_ptr<Agent> join_world(Options options) {
  const SecretWiper wiper(options.secret);
  auto loop = std::make_shared<base::EventLoop>("stitch-loop");
  // Stretched once, for the store and all connections.
  const std::shared_ptr<const transport::SecretKey> key =
      options.secret.empty() ? nullptr : transport::SecretKey::stretch(options.secret);
  wipe(options.secret);  // its text is not needed any more
  OpenStore opened = open_store(options, key, *loop);
  const auto store = transport::make_prefix_store("stitch", opened.store);
  Rendezvous rendezvous(options, *store, opened.server != nullptr);
  const MemberRecords records = rendezvous.meet(describe_this_worker(options));
  const MemberRecord& self = records[static_cast<std::size_t>(options.rank)];

  transport::EndpointOptions endpoint_options;
  endpoint_options.self.id = static_cast<std::uint32_t>(options.rank);
  endpoint_options.self.epoch = self.epoch;
  endpoint_options.self.name = options.name;
  endpoint_options.self.world = rendezvous.world_number();
  endpoint_options.secret = key;
  endpoint_options.encryption = options.encryption.value_or(Encryption::on);
  endpoint_options.max_frame_bytes = options.max_frame_bytes;
  // A message that is larger is received alone.
  endpoint_options.max_receiving_bytes = options.max_inflight_bytes;
  const auto receive_pool = transport::make_trimmed_pool(options.receive_pool_bytes, loop);
  endpoint_options.allocator = [receive_pool](transport::Device device, std::size_t bytes) {
    return receive_pool->allocate(device, bytes);
  };

  const LoopbackRule by_loopback(options, self);
  auto peers = std::make_unique<PeerTable>();
  const auto plan = transport::parse_fault_plan(options.fault);
  const auto faults = plan ? transport::Faults::make(*plan, options.name) : nullptr;
  auto addresses =
      peers->listen(with_faults(transport::make_loopback_endpoint(
                                    endpoint_options, transport::LoopbackNetwork::process_wide()),
                                faults));
  if (!std::all_of(records.begin(), records.end(), by_loopback))
    listen(*peers, endpoint_options, options, records, self, faults, addresses);
  const auto members =
      known_members(records, self, rendezvous.exchange_addresses(addresses), by_loopback);

  auto agent = std::make_shared<Agent>(
      options, members[static_cast<std::size_t>(options.rank)].info, loop, receive_pool);
  agent->set_world(endpoint_options.self.world);
  agent->set_faults(faults);
  agent->start(std::move(peers), members, std::make_shared<OpenStore>(std::move(opened)));
  try {
    rendezvous.finish();
  } catch (...) {
    // It serves already, and init() will not return it.
    static_cast<void>(agent->shutdown(false, std::chrono::nanoseconds(0)));
    throw;
  }
  return agent;
}

}  // namespace stitch::rpc
