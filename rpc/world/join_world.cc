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
#include "stitch/rpc/world/member_record.h"
#include "stitch/rpc/world/open_store.h"
#include "stitch/rpc/world/reach.h"
#include "stitch/rpc/world/rendezvous.h"
#include "stitch/rpc/world/running_world.h"
#include "stitch/rpc/world/world_extension.h"
#include "stitch/rpc/world/world_keeper.h"
#include "stitch/transport/faults/faults.h"
#include "stitch/transport/loopback/loopback_endpoint.h"
#include "stitch/transport/trimmed_pool.h"
#include "stitch/transport/wire/secret_key.h"

namespace stitch::rpc {

namespace {

using Deadline = std::chrono::steady_clock::time_point;

// With one epoch after the other. The first refusal names the last epoch that a member knows; more
// follow only where members know different ones, or others of the name come at the same time.
constexpr int kMaxEpochTries = 8;

// What an agent keeps of the store until its end. The keeper ends before the store it writes to.
struct Kept {
  OpenStore opened;
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
        store_(opened_.store),
        deadline_(deadline),
        self_(describe_this_worker(options)) {}

  // The running agent, once all other members know it.
  std::shared_ptr<Agent> enter();

 private:
  class Trial;
  // Null when the founding has been given up.
  std::shared_ptr<Agent> found(Rendezvous& rendezvous,
                               const std::vector<Rendezvous::Founder>& founders);
  // Becomes a member as `info`, with a higher epoch where members know one that the store has lost.
  std::shared_ptr<Agent> join(const WorldRecord& record, WorkerInfo& info);
  // Whether a member of the world answers.
  bool lives(const WorldRecord& record);
  // An agent that knows the live members of the world, as `info`.
  std::shared_ptr<Agent> approach(const WorldRecord& record, const WorkerInfo& info);
  // This worker is a member: from here on it may have to keep the world's record.
  std::shared_ptr<Agent> keep(std::shared_ptr<Agent> agent);
  // The worker has its name, id and epoch.
  void be(const WorkerInfo& info);
  // Listens where `members` will connect from; the card to be published.
  MemberCard listen(const WorkerInfo& info, std::uint64_t world,
                    const std::vector<MemberRecord>& members);
  // `joins`: the other members do not know it yet.
  std::shared_ptr<Agent> start(const MemberCard& own, const WorldRecord& record, bool joins);

  Options& options_;
  const std::shared_ptr<base::EventLoop> loop_;
  const std::shared_ptr<const transport::SecretKey> key_;
  OpenStore opened_;
  const std::shared_ptr<transport::Store> store_;
  const Deadline deadline_;
  MemberRecord self_;
  std::shared_ptr<transport::BlockPool> receive_pool_;
  std::shared_ptr<transport::Faults> faults_;  // null: none
  std::unique_ptr<PeerTable> peers_;
  std::shared_ptr<WorldKeeper> keeper_;
  // What this worker would have been in a world that turned out to be dead. The epoch has been used
  // nowhere, so the world that follows takes it.
  std::optional<WorkerInfo> unused_;
};

// A running agent that init() may not return: it ends, unless it is kept.
class Entrance::Trial {
 public:
  Trial(Entrance& entrance, std::shared_ptr<Agent> agent)
      : entrance_(entrance), agent_(std::move(agent)) {}
  ~Trial() {
    if (!agent_) return;
    static_cast<void>(agent_->shutdown(false, std::chrono::nanoseconds(0)));
    entrance_.keeper_ = nullptr;
  }
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;
  [[nodiscard]] Agent& agent() const noexcept { return *agent_; }
  [[nodiscard]] std::shared_ptr<Agent> keep() noexcept { return std::move(agent_); }

 private:
  Entrance& entrance_;
  std::shared_ptr<Agent> agent_;
};

std::shared_ptr<Agent> Entrance::enter() {
  const auto [name, rank] = std::pair(options_.name, options_.rank);
  RunningWorld running(options_, *store_, deadline_);
  if (opened_.served && options_.world_size.is_elastic())
    running.await_former_world(opened_.server != nullptr);
  bool tried = false;
  const auto start_over = [&, name = name, rank = rank] {
    options_.name = self_.name = name;
    options_.rank = rank;
    self_.rank = rank;
  };
  std::shared_ptr<Agent> agent;
  // Its keeper may have died unnoticed: the member that this worker asks notices.
  RunningWorld::Reach reach;
  reach.join = [&](const WorldRecord& silent) {
    WorkerInfo info = running.claim(silent);
    try {
      agent = join(silent, info);
      return true;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::disconnected) throw;
      unused_ = info;
      start_over();
      return false;
    }
  };
  reach.lives = [&](const WorldRecord& silent) {
    const bool lives = this->lives(silent);
    start_over();
    return lives;
  };
  Rendezvous rendezvous(options_, *store_, opened_.server != nullptr, deadline_);
  for (;;) {
    start_over();
    const auto record = running.find(reach);
    if (agent) return keep(std::move(agent));
    if (record) {
      try {
        WorkerInfo info = running.claim(*record);
        return keep(join(*record, info));
      } catch (const Error& error) {
        // Its last members may have ended meanwhile.
        if (error.code() != ErrorCode::disconnected || tried) throw;
        tried = true;
        continue;
      }
    }
    const auto founders = rendezvous.meet(self_, [&] { return running.is_recorded(); });
    if (!founders) continue;
    if (auto founder = found(rendezvous, *founders)) return keep(std::move(founder));
  }
}

std::shared_ptr<Agent> Entrance::keep(std::shared_ptr<Agent> agent) {
  if (faults_ && faults_->spares_this_life()) {
    const std::string epoch = std::to_string(agent->self().epoch);
    std::fprintf(stderr,
                 "stitch: faults do not kill or stop %s: it has epoch %s, and they are for others "
                 "(kill=%s/%s@... is for epoch %s)\n",
                 to_string(agent->self()).c_str(), epoch.c_str(), agent->name().c_str(),
                 epoch.c_str(), epoch.c_str());
  }
  WorldExtension::of(*agent).keep(std::exchange(keeper_, nullptr));
  return agent;
}

void Entrance::be(const WorkerInfo& info) {
  options_.name = self_.name = info.name;
  options_.rank = static_cast<int>(info.id.value());
  self_.rank = options_.rank;
}

std::shared_ptr<Agent> Entrance::found(Rendezvous& rendezvous,
                                       const std::vector<Rendezvous::Founder>& founders) {
  const WorkerInfo info = rendezvous.self(std::exchange(unused_, std::nullopt));
  be(info);
  std::vector<MemberRecord> members;
  for (const auto& founder : founders) members.push_back(founder.record);
  WorldRecord record;
  record.number = rendezvous.world_number();
  record.size = options_.world_size;
  const MemberCard own = listen(info, record.number, members);
  auto cards = rendezvous.exchange(own);
  if (!cards) {
    peers_ = nullptr;  // no peer will connect
    return nullptr;
  }
  for (auto& card : *cards) record.entries.push_back({std::move(card), true});
  Trial trial(*this, start(own, record, false));
  return rendezvous.finish(record) ? trial.keep() : nullptr;
}

bool Entrance::lives(const WorldRecord& record) {
  // A life that no member knows, and that none is told of.
  WorkerInfo info{"stranger", {}, 1};
  for (std::uint32_t id = 0; record.find(WorkerId(id)) != nullptr;) info.id = WorkerId(++id);
  for (int i = 2; record.find(info.name) != nullptr; ++i)
    info.name = "stranger" + std::to_string(i);
  const Trial trial(*this, approach(record, info));
  return trial.agent().reaches_a_member(deadline_);
}

std::shared_ptr<Agent> Entrance::join(const WorldRecord& record, WorkerInfo& info) {
  for (int tries = 1;; ++tries) {
    std::optional<Notice> refusal;
    {
      Trial trial(*this, approach(record, info));
      refusal = trial.agent().join(deadline_);
      if (!refusal) return trial.keep();
    }
    if (tries == kMaxEpochTries) throw from_refusal_text(refusal->text).with_worker(info.name);
    // A member knows a life that neither the record nor the counter of the store knew.
    info.epoch = RunningWorld::next_epoch(*store_, info.name, refusal->lives[0].card.info.epoch);
  }
}

std::shared_ptr<Agent> Entrance::approach(const WorldRecord& record, const WorkerInfo& info) {
  be(info);
  std::vector<MemberRecord> members{self_};
  for (const auto& entry : record.entries) {
    if (entry.live && entry.card.info.id != info.id)
      members.push_back(MemberRecord::decode(entry.card.record));
  }
  const MemberCard own = listen(info, record.number, members);
  WorldRecord with_self = record;
  std::erase_if(with_self.entries,
                [&](const auto& entry) { return entry.card.info.id == info.id; });
  with_self.entries.push_back({own, true});
  return start(own, with_self, true);
}

MemberCard Entrance::listen(const WorkerInfo& info, std::uint64_t world,
                            const std::vector<MemberRecord>& members) {
  transport::EndpointOptions endpoint_options;
  endpoint_options.self.id = info.id.value();
  endpoint_options.self.epoch = info.epoch;
  endpoint_options.self.name = info.name;
  endpoint_options.self.world = world;
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
  const Reach reach(options_, self_);
  const auto plan = transport::parse_fault_plan(options_.fault);
  if (plan || transport::Faults::judges_expected()) {
    faults_ = transport::Faults::make(plan.value_or(transport::FaultPlan{}), info.name, info.epoch,
                                      info.id.value());
  }
  peers_ = std::make_unique<PeerTable>(options_.reconnect_timeout);
  MemberCard own{info, {}, self_.encode()};
  if (own.record.size() > MemberCard::kMaxRecordBytes) {
    throw Error(ErrorCode::invalid_argument,
                "worker \"" + info.name +
                    "\" describes itself to the others, its device maps "
                    "included, in " +
                    std::to_string(own.record.size()) + " bytes; the limit is " +
                    std::to_string(MemberCard::kMaxRecordBytes))
        .with_worker(info.name);
  }
  own.addresses =
      peers_->listen(with_faults(transport::make_loopback_endpoint(
                                     endpoint_options, transport::LoopbackNetwork::process_wide()),
                                 faults_));
  const bool loopback_is_enough =
      !options_.world_size.is_elastic() &&
      std::all_of(members.begin(), members.end(),
                  [&](const MemberRecord& member) { return reach.by_loopback(member); });
  if (!loopback_is_enough) {
    for (auto& address :
         listen_where_needed(*peers_, endpoint_options, options_, members, self_, faults_))
      own.addresses.push_back(std::move(address));
  }
  return own;
}

std::shared_ptr<Agent> Entrance::start(const MemberCard& own, const WorldRecord& record,
                                       bool joins) {
  auto agent = std::make_shared<Agent>(options_, own.info, loop_, receive_pool_);
  agent->set_world(record.number);
  agent->set_faults(faults_);
  const Reach reach(options_, self_);
  MembershipHooks hooks;
  hooks.self = own;
  hooks.joins = joins;
  std::vector<Member> members;
  for (const auto& entry : record.entries) {
    if (!entry.live) continue;
    hooks.members.push_back(entry.card);
    members.push_back(reach.see(entry.card));
  }
  hooks.see = [reach](const MemberCard& card) { return reach.see(card); };
  hooks.admit = [size = record.size](const MemberCard& joiner,
                                     const std::vector<MemberCard>& live) {
    return objection_to(joiner, live, size);
  };
  agent->set_membership(std::move(hooks));
  auto kept = std::make_shared<Kept>();
  kept->opened = opened_;
  keeper_ = kept->keeper = std::make_shared<WorldKeeper>(opened_, record);
  agent->start(std::move(peers_), members, std::move(kept));
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
      options.secret.empty() ? nullptr : transport::SecretKey::stretch(options.secret);
  wipe(options.secret);  // its text is not needed any more
  OpenStore opened = open_store(options, key, loop, deadline);
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
    opened = open_store(options, key, loop, deadline);
    options.init_timeout = given.init_timeout;
  }
}

}  // namespace stitch::rpc
