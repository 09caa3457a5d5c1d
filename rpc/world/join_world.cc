#include "stitch/rpc/world/join_world.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "stitch/base/deadline.h"
#include "stitch/base/event_loop.h"
#include "stitch/rpc/agent/membership_hooks.h"
#include "stitch/rpc/membership/notice.h"
#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/options/security_options.h"
#include "stitch/rpc/world/admission.h"
#include "stitch/rpc/world/founding.h"
#include "stitch/rpc/world/member_record.h"
#include "stitch/rpc/world/open_store.h"
#include "stitch/rpc/world/reach.h"
#include "stitch/rpc/world/world_extension.h"
#include "stitch/rpc/world/world_keeper.h"
#include "stitch/transport/faults/faults.h"
#include "stitch/transport/trimmed_pool.h"
#include "stitch/transport/wire/secret_key.h"

namespace stitch::rpc {

namespace {

using Deadline = std::chrono::steady_clock::time_point;

// What an agent keeps of the store until its end. The keeper ends before the store it writes to.
struct KeptStore {
  ~KeptStore() { keeper->end(); }
  std::shared_ptr<void> server;
  std::shared_ptr<WorldKeeper> keeper;
};

// One worker on its way into a world. Lives within join_world().
class Entrance {
 public:
  Entrance(Options& options, std::shared_ptr<base::EventLoop> loop,
           std::shared_ptr<const transport::SecretKey> key, OpenStore opened, Deadline deadline)
      : options_(options),
        loop_(std::move(loop)),
        key_(std::move(key)),
        opened_(std::move(opened)),
        deadline_(deadline) {}

  // The running agent, once all other members know it.
  std::shared_ptr<Agent> enter();

 private:
  [[nodiscard]] transport::EndpointOptions endpoint_options();
  [[nodiscard]] Founding::Leading leading() const;
  [[nodiscard]] std::shared_ptr<transport::Faults> faults_of(const WorkerInfo& info) const;
  std::shared_ptr<Agent> start(BoundEndpoints& endpoints, Founding::Place place,
                               const MemberCard& own);

  Options& options_;
  const std::shared_ptr<base::EventLoop> loop_;
  const std::shared_ptr<const transport::SecretKey> key_;
  OpenStore opened_;
  const Deadline deadline_;
  std::shared_ptr<transport::BlockPool> receive_pool_;
};

std::shared_ptr<Agent> Entrance::enter() {
  MemberClaim claim{describe_this_worker(options_, key_ != nullptr), {}};
  const std::string record = claim.record.encode();
  if (record.size() > MemberCard::kMaxRecordBytes) {
    throw Error(ErrorCode::invalid_argument,
                "worker \"" + options_.name +
                    "\" describes itself to the others, its device maps included, in " +
                    std::to_string(record.size()) + " bytes; the limit is " +
                    std::to_string(MemberCard::kMaxRecordBytes))
        .with_worker(options_.name);
  }
  BoundEndpoints endpoints(options_, claim.record, endpoint_options());
  claim.addresses = endpoints.addresses();
  Founding founding(options_, *opened_.store, leading(), deadline_);
  Founding::Place place = founding.find_place(claim);
  const MemberCard own = *place.world.find(claim.record.token);
  options_.name = own.info.name;
  options_.rank = static_cast<int>(own.info.id.value());
  return start(endpoints, std::move(place), own);
}

// A TCP store is served by the worker that leads. In a fixed world that is rank 0, in an elastic
// one the first to come.
Founding::Leading Entrance::leading() const {
  const bool hosts = opened_.server != nullptr;
  const bool elastic = options_.world_size.is_elastic();
  if (!elastic) return {.leads = options_.rank == 0};
  return {.leads = hosts, .stands = !opened_.served, .returns = hosts};
}

transport::EndpointOptions Entrance::endpoint_options() {
  transport::EndpointOptions endpoint_options;
  endpoint_options.secret = key_;
  endpoint_options.encryption = options_.encryption.value_or(Encryption::on);
  // Of what is longer than the option says, an agent takes frames of membership only.
  endpoint_options.max_frame_bytes = std::max(options_.max_frame_bytes, wire::kMaxMembershipBytes);
  // A message that is larger is received alone.
  endpoint_options.max_receiving_bytes = options_.max_inflight_bytes;
  receive_pool_ = transport::make_trimmed_pool(
      options_.receive_pool_bytes, loop_, transport::kUnusedBlockTime, options_.max_inflight_bytes);
  endpoint_options.allocator = [pool = receive_pool_](transport::Device device, std::size_t bytes) {
    return pool->allocate(device, bytes);
  };
  return endpoint_options;
}

std::shared_ptr<transport::Faults> Entrance::faults_of(const WorkerInfo& info) const {
  const auto plan = transport::parse_fault_plan(options_.fault);
  if (!plan && !transport::Faults::judges_expected()) return nullptr;
  auto faults = transport::Faults::make(plan.value_or(transport::FaultPlan{}), info.name,
                                        info.epoch, info.id.value());
  if (faults->spares_this_life()) {
    const std::string epoch = std::to_string(info.epoch);
    std::fprintf(stderr,
                 "stitch: faults do not kill or stop %s: it has epoch %s, and they are for others "
                 "(kill=%s/%s@... is for epoch %s)\n",
                 to_string(info).c_str(), epoch.c_str(), info.name.c_str(), epoch.c_str(),
                 epoch.c_str());
  }
  return faults;
}

std::shared_ptr<Agent> Entrance::start(BoundEndpoints& endpoints, Founding::Place place,
                                       const MemberCard& own) {
  const auto faults = faults_of(own.info);
  const Reach reach(MemberRecord::decode(own.record));
  MembershipHooks hooks;
  hooks.self = own;
  std::vector<Member> members;
  std::vector<MemberRecord> records;
  for (const auto& life : place.world.lives) {
    if (life.state != LifeState::alive) continue;
    // A record that cannot be read is a lie of another member, and keeps no worker out.
    const auto unreadable = base::failure_of([&] {
      records.push_back(MemberRecord::decode(life.card.record));
      members.push_back(reach.see(life.card));
    });
    if (unreadable) members.push_back({life.card.info, {}, {}});
  }
  endpoints.check(distance_of(records));
  hooks.lives = std::move(place.world.lives);
  hooks.see = [reach](const MemberCard& card) { return reach.see(card); };
  hooks.admit = [size = options_.world_size](const MemberCard& joiner,
                                             const std::vector<MemberCard>& live) {
    return objection_to(joiner, live, size);
  };
  auto peers = std::make_unique<PeerTable>(options_.reconnect_timeout);
  transport::Hello self;
  self.id = own.info.id.value();
  self.epoch = own.info.epoch;
  self.name = own.info.name;
  self.world = place.world.number;
  endpoints.listen(*peers, self, own.addresses, faults);
  auto agent = std::make_shared<Agent>(options_, own.info, loop_, receive_pool_);
  agent->set_world(place.world.number);
  agent->set_faults(faults);
  agent->set_membership(std::move(hooks));
  auto kept = std::make_shared<KeptStore>();
  kept->server = opened_.server;
  const auto keeper = kept->keeper = std::make_shared<WorldKeeper>(
      std::move(opened_), place.world.number, std::move(place.keeper));
  agent->start(std::move(peers), members, std::move(kept));
  WorldExtension::of(*agent).keep(keeper);
  return agent;
}

// Whether the worker that serves this store has ended.
bool is_lost(transport::Store& store) {
  const auto error = base::failure_of([&] { static_cast<void>(store.try_get(world_key::kWorld)); });
  return error && error->code() == ErrorCode::disconnected;
}

}  // namespace

std::shared_ptr<Agent> join_world(Options options) {
  const SecretWiper wiper(options.secret);
  const auto deadline = base::deadline_after(options.init_timeout);
  auto loop = std::make_shared<base::EventLoop>("stitch-loop");
  // Stretched once, for the store and all connections.
  const std::shared_ptr<const transport::SecretKey> key =
      options.secret ? transport::SecretKey::stretch(*options.secret) : nullptr;
  wipe(options.secret);  // its text is not needed any more
  OpenStore opened = open_store(options, key, deadline);
  const Options given = options;
  for (;;) {
    try {
      return Entrance(options, loop, key, opened, deadline).enter();
    } catch (const Error& error) {
      // Where worker 0 has died, its next life serves another store at the same place.
      const bool may_come_back = opened.served && opened.server == nullptr;
      if (!may_come_back || error.code() != ErrorCode::disconnected || !is_lost(*opened.store))
        throw;
      if (std::chrono::steady_clock::now() >= deadline) throw;
    }
    options = given;
    // Its requests end with the grace time in any case.
    options.init_timeout = std::max<std::chrono::nanoseconds>(
        deadline - std::chrono::steady_clock::now(), OpenStore::kGraceTime);
    opened = open_store(options, key, deadline);
    options.init_timeout = given.init_timeout;
  }
}

}  // namespace stitch::rpc
