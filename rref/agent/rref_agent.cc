#include "stitch/rref/agent/rref_agent.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "stitch/rpc/message/frame_kinds.h"
#include "stitch/rpc/message/life_text.h"
#include "stitch/rref/agent/frame_kinds.h"

namespace stitch::rref {
namespace {

// True for transports of stitch's own only.
bool reports_losses(const std::vector<std::string>& transports) {
  return std::none_of(transports.begin(), transports.end(), [](const std::string& transport) {
    return transport == "tensorpipe-shm" || transport == "uv";
  });
}

Error life_is_over(const WorkerInfo& peer, std::uint64_t epoch, const std::string& why) {
  return rpc::life_gone({peer.name, peer.id, epoch}, why);
}

// This very life, be it over; null if it is not known here.
const rpc::PeerLife* find_life(rpc::Agent& agent, const WorkerLife& life) {
  return agent.peers().life(WorkerInfo{"", WorkerId(life.id), life.epoch});
}

// Its name is that of any life of this worker: they share it; empty if none is known here.
WorkerInfo describe(rpc::Agent& agent, const WorkerLife& life) {
  WorkerInfo info{"", WorkerId(life.id), life.epoch};
  if (const rpc::PeerLife* present = agent.peers().life(info.id)) info.name = present->info().name;
  return info;
}

std::string now_in(const WorkerInfo& present) {
  return "; it is now epoch " + std::to_string(present.epoch);
}

}  // namespace

RRefAgent::RRefAgent(rpc::Agent& agent)
    : self_(agent.self()),
      knows_losses_(reports_losses(agent.options().transports)),
      events_(agent.shared_events()),
      lifetime_(std::make_shared<Lifetime>(life_of(agent.self()))),
      ledgers_(std::make_shared<LedgerSender>(agent, lifetime_)),
      agent_(&agent) {
  // Called for messages of peers only: the agent and its table of peers exist then.
  lifetime_->set_world(
      {.contains = [&agent](const WorkerLife& life) { return find_life(agent, life) != nullptr; },
       // All that this worker knows. Those that are over are told one by one: membership itself may
       // be ahead, and a life that it counts no more may not have been swept.
       .live =
           [&agent] {
             std::vector<WorkerLife> live;
             for (const WorkerInfo& each : agent.peers().infos()) live.push_back(life_of(each));
             return live;
           },
       .gone =
           [&agent](const WorkerLife& life) {
             return life_is_over(describe(agent, life), life.epoch, "");
           }});
}

std::shared_ptr<rpc::Agent> RRefAgent::agent() const {
  if (stopped_.load(std::memory_order_acquire)) return nullptr;
  if (!agent_known_.load(std::memory_order_acquire)) {  // there is none in the constructor
    base::MutexLock lock(mutex_);
    if (agent_ == nullptr) return nullptr;
    auto alive = agent_->weak_from_this().lock();
    if (alive && !agent_known_.load(std::memory_order_relaxed)) {
      weak_agent_ = alive;
      agent_known_.store(true, std::memory_order_release);
    }
    return alive;
  }
  return weak_agent_.lock();
}

std::shared_ptr<rpc::Agent> RRefAgent::require_agent() const {
  auto alive = agent();
  if (!alive) throw Error(ErrorCode::shutting_down, "this worker has shut down");
  return alive;
}

void RRefAgent::carry_out(Effects effects) noexcept {
  for (Effects::Run& waiter : effects.run) waiter();
  if (!effects.destroy.empty()) destroy(std::move(effects.destroy));
  ledgers_->schedule(effects);
}

namespace {
thread_local bool destroying = false;
}  // namespace

// All at once, by one thread: the one that has read why, once it has read all.
void RRefAgent::destroy(std::vector<std::shared_ptr<void>> objects) noexcept {
  const auto alive = agent();
  if (!alive) return;  // on this thread
  events_->record("objects dropped", base::EventRing::kNoPeer, 0, objects.size());
  alive->post_where_read([objects = std::move(objects)]() mutable {
    destroying = true;
    objects.clear();
    destroying = false;
  });
}

// A destructor that waits reads messages meanwhile.
bool RRefAgent::destroys_here() noexcept { return destroying && !rpc::Agent::delivers_here(); }

WorkerInfo RRefAgent::info_of(const WorkerLife& life) const {
  const auto alive = agent();
  return alive ? describe(*alive, life) : WorkerInfo{"", WorkerId(life.id), life.epoch};
}

const WorkerInfo& RRefAgent::known_info_of(const WorkerLife& life) const {
  const WorkerInfo* const last = last_info_.load(std::memory_order_acquire);
  if (last != nullptr && life_of(*last) == life) return *last;
  const auto remember = [this](const WorkerInfo& info) -> const WorkerInfo& {
    last_info_.store(&info, std::memory_order_release);
    return info;
  };
  {
    const base::MutexLock lock(infos_mutex_);
    const auto found = infos_.find(life);
    if (found != infos_.end()) return remember(found->second);
  }
  WorkerInfo info = info_of(life);
  const base::MutexLock lock(infos_mutex_);
  // A reference may come before the news of its owner: the name is known to later calls.
  if (info.name.empty()) return unnamed_infos_.try_emplace(life, std::move(info)).first->second;
  return remember(infos_.try_emplace(life, std::move(info)).first->second);
}

HandlePtr RRefAgent::adopt(const RRefId& id) {
  static_cast<void>(known_info_of(id.owner));  // while this worker has not shut down
  auto handle = std::make_shared<Handle>(shared_from_this());
  lifetime_->add_local(id);
  handle->own(id);
  record("reference received", id);
  return handle;
}

std::optional<Error> RRefAgent::why_not_owner(const WorkerLife& owner) const {
  const auto alive = agent();
  if (!alive || owner == lifetime_->self()) return std::nullopt;
  const rpc::PeerLife* present = alive->peers().life(WorkerId(owner.id));
  if (present != nullptr && present->info().epoch == owner.epoch) return std::nullopt;
  if (present != nullptr && present->info().epoch > owner.epoch)
    return life_is_over(present->info(), owner.epoch, now_in(present->info()));
  const WorkerInfo info = info_of(owner);
  return Error(ErrorCode::disconnected,
               rpc::life_text(info, rpc::LifeName::brief) + " is not known here yet")
      .with_worker(info.name);
}

std::optional<Error> RRefAgent::loss_of(const RRefId& id) const {
  auto lost = lifetime_->status(id).lost;
  const auto alive = lost ? agent() : nullptr;
  if (!alive) return lost;
  const rpc::PeerLife* present = alive->peers().life(WorkerId(id.owner.id));
  if (present != nullptr && present->info().epoch > id.owner.epoch)
    return life_is_over(present->info(), id.owner.epoch, now_in(present->info()));
  return lost;
}

Error RRefAgent::loss_told_by(const WorkerInfo& from, const WorkerLife& owner) const {
  return life_is_over(info_of(owner), owner.epoch,
                      ": the reference was lost at " + to_string(from));
}

void RRefAgent::require_alive(const WorkerInfo& peer) const {
  if (const auto lost = require_agent()->peers().lost(peer)) throw *lost;
}

void RRefAgent::accept_ledger(const WorkerInfo& from, std::span<const std::byte> frame) {
  Effects effects = lifetime_->accept_ledger(life_of(from), frame);
  const auto broken = std::move(effects.broken);
  carry_out(std::move(effects));
  if (broken) throw *broken;
}

void RRefAgent::on_peer_lost(const WorkerInfo& peer, const Error& reason) {
  events_->record("references lost", peer.id.value(), peer.epoch);
  carry_out(lifetime_->peer_lost(
      life_of(peer), life_is_over(peer, peer.epoch, std::string(": ") + reason.what())));
}

void RRefAgent::on_member_over(const WorkerInfo& member, const std::string& why) {
  carry_out(lifetime_->member_over(life_of(member), life_is_over(member, member.epoch, why)));
}

void RRefAgent::on_member_joined(const WorkerInfo& joined) {
  carry_out(lifetime_->member_joined(life_of(joined)));
}

void RRefAgent::stop() {
  const Error why(ErrorCode::shutting_down, "this worker has shut down");
  Effects leaving = lifetime_->leave(why);
  Effects closing = lifetime_->close();
  {
    // Handlers that still run may be in a method or use the result of local_value().
    base::MutexLock lock(mutex_);
    for (auto* objects : {&leaving.destroy, &closing.destroy}) {
      std::move(objects->begin(), objects->end(), std::back_inserter(remaining_));
      objects->clear();
    }
  }
  carry_out(std::move(leaving));
  carry_out(std::move(closing));
  time_limits_->close();
  ledgers_->stop();
  stopped_.store(true, std::memory_order_release);
  base::MutexLock lock(mutex_);
  agent_ = nullptr;
}

void RRefAgent::destroy_remaining() {
  decltype(remaining_) remaining;
  {
    base::MutexLock lock(mutex_);
    remaining.swap(remaining_);
  }
}

rpc::Table RRefAgent::unfinished() const {
  rpc::Table table{"objects being created",
                   {"object", "owner", "creator", "creator id", "made by", "asked for", "age"}};
  const auto counts = lifetime_->counts();
  if (counts.entries + counts.holds > kMaxListed) {
    table.left_out = counts.entries + counts.holds;
    return table;
  }
  const auto now = std::chrono::steady_clock::now();
  for (const ListedRef& ref : lifetime_->list()) {
    const bool here = ref.owned && ref.owned->value == OwnerTable::Value::pending;
    const bool there = ref.held && ref.held->state == HolderTable::State::creating;
    if (!here && !there) continue;
    const auto add = [&](const auto& status, bool asked_for) {
      table.add({std::to_string(ref.id.creator.id) + "/" + std::to_string(ref.id.k),
                 info_of(ref.id.owner).name, info_of(ref.id.creator).name, ref.id.creator.id,
                 status.made_by == nullptr ? std::string() : *status.made_by, asked_for ? 1 : 0,
                 now - status.since});
    };
    if (here) {
      add(*ref.owned, ref.owned->requested);
    } else {
      add(*ref.held, true);
    }
  }
  return table;
}

void RRefAgent::debug_info(std::map<std::string, std::int64_t>& numbers) const {
  using Value = OwnerTable::Value;
  using State = HolderTable::State;
  const auto counts = lifetime_->counts();
  const auto put = [&](const char* name, std::size_t number) {
    numbers.emplace(std::string("rref.") + name, static_cast<std::int64_t>(number));
  };
  put("entries", counts.entries);
  put("entries_pending", counts.owned.in(Value::pending));
  put("entries_failed", counts.owned.in(Value::failed));
  put("entries_waiting_calls", counts.owned.waiters);
  put("holders", counts.owned.holders);
  put("holds", counts.holds);
  put("holds_creating", counts.held.in(State::creating));
  put("holds_borrowed", counts.held.in(State::borrowed));
  put("holds_registering", counts.held.in(State::registering));
  put("holds_registered", counts.held.in(State::registered));
  put("holds_lost", counts.held.in(State::lost));
  put("pins", counts.tokens);
  put("creditors", counts.held.creditors);
  put("registrations", counts.held.registrations);
  put("ledger_unsent", counts.ledger_unsent);
  put("ledger_frames", ledgers_->frames_sent());
  put("lives_unswept", counts.unswept);
  numbers.emplace("rref.bytes_known", bytes_known_.load());
}

}  // namespace stitch::rref
