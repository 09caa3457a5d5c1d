// One file, though long: the events of handles, messages and ledgers, and of lives that end.
#include "stitch/rref/lifetime/lifetime.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <string>
#include <utility>

namespace stitch::rref {
namespace {
constexpr const char* kNoCreator = "its creator died before creation";
}  // namespace

RRefId Lifetime::add_object(std::shared_ptr<void> object, const std::string* made_by) {
  base::MutexLock lock(mutex_);
  if (leaving_) throw *leaving_;
  const RRefId id = new_id(self_);
  owners_.add(id, std::move(object), made_by);
  return id;
}

RRefId Lifetime::begin_create(const WorkerLife& owner, const std::string* made_by) {
  base::MutexLock lock(mutex_);
  if (leaving_) throw *leaving_;
  const auto gone = gone_.find(owner);
  if (gone != gone_.end()) throw gone->second;
  const RRefId id = new_id(owner);
  holders_.begin_create(id, made_by);
  return id;
}

RRefId Lifetime::new_id(const WorkerLife& owner) {
  std::uint64_t& next = next_k_[owner];
  while (holders_.contains({owner, self_, next})) ++next;
  return {owner, self_, next++};
}

Effects Lifetime::answered(const RRefId& id, const std::optional<Error>& failure) {
  base::MutexLock lock(mutex_);
  TableEffects effects;
  holders_.answered(id, failure, effects);
  return pack(std::move(effects));
}

Effects Lifetime::create_not_sent(const RRefId& id, const Error& why) {
  base::MutexLock lock(mutex_);
  TableEffects effects;
  holders_.create_not_sent(id, why, effects);
  return pack(std::move(effects));
}

bool Lifetime::create(const RRefId& id, const WorkerLife& creator, const std::string* made_by) {
  if (id.owner != self_ || id.creator != creator) {
    throw Error(ErrorCode::protocol, to_string(id) + " cannot be requested here by worker " +
                                         std::to_string(creator.id));
  }
  base::MutexLock lock(mutex_);
  if (leaving_) throw *leaving_;
  const auto gone = gone_.find(creator);
  if (gone != gone_.end()) throw gone->second;
  return owners_.create(id, creator, made_by);
}

Effects Lifetime::resolve(const RRefId& id, std::shared_ptr<void> object,
                          const std::optional<Error>& failure) {
  base::MutexLock lock(mutex_);
  TableEffects effects;
  owners_.resolve(id, std::move(object), failure, effects);
  return pack(std::move(effects));
}

bool Lifetime::tracks_creation(const RRefId& id) const {
  base::MutexLock lock(mutex_);
  return leaving_ || id.owner == self_ || holders_.tracks_creation(id);
}

Effects Lifetime::when_created(const RRefId& id, Waiter waiter) {
  base::MutexLock lock(mutex_);
  TableEffects effects;
  if (leaving_) {
    effects.run.push_back({std::move(waiter), nullptr, leaving_});
  } else if (owned_here(id)) {
    owners_.when_resolved(id, std::move(waiter), effects);
  } else {
    holders_.when_answered(id, std::move(waiter), effects);
  }
  return pack(std::move(effects));
}

Lifetime::Watch Lifetime::watch_creation(const RRefId& id, Waiter& waiter) {
  base::MutexLock lock(mutex_);
  Watch watch;
  TableEffects effects;
  if (leaving_) {
    watch.lost = leaving_;
  } else if (owned_here(id)) {
    owners_.when_resolved(id, std::move(waiter), effects);
    watch.tracked = true;
  } else if (auto hold = holders_.status(id); !hold) {
    watch.lost = Error(ErrorCode::internal, to_string(id) + " is not held here");
  } else if (hold->state == HolderTable::State::lost) {
    watch.lost = std::move(hold->error);
  } else if (holders_.tracks_creation(id)) {
    holders_.when_answered(id, std::move(waiter), effects);
    watch.tracked = true;
  }
  watch.effects = pack(std::move(effects));
  return watch;
}

void Lifetime::add_local(const RRefId& id) {
  base::MutexLock lock(mutex_);
  if (leaving_) return;
  if (owned_here(id)) {
    owners_.add_local(id);
  } else {
    holders_.add_local(id);
  }
}

Effects Lifetime::drop_local(const RRefId& id) {
  base::MutexLock lock(mutex_);
  TableEffects effects;
  if (leaving_) return {};
  if (owned_here(id)) {
    owners_.drop_local(id, effects);
  } else {
    holders_.drop_local(id, effects);
  }
  return pack(std::move(effects));
}

CarriedRef Lifetime::pin(const RRefId& id, const WorkerLife& receiver) {
  base::MutexLock lock(mutex_);
  CarriedRef carried{.id = id};
  if (leaving_) throw *leaving_;
  if (const auto gone = gone_.find(receiver); gone != gone_.end()) throw gone->second;
  if (receiver == self_) {  // counters only: the message is one more local reference
    if (owned_here(id)) {
      owners_.add_local(id);
    } else {
      holders_.add_local(id);
    }
    return carried;
  }
  if (owned_here(id)) {
    owners_.pin(id);
    carried.created = !owners_.pending(id);
  } else {
    if (!holders_.pin(id)) {
      carried.lost = true;
      return carried;
    }
    carried.created = holders_.created(id);
  }
  PeerState& peer = peers_[receiver];
  peer.tokens.emplace(peer.next_token, id);
  carried.pinned = true;
  carried.token = peer.next_token++;
  return carried;
}

Effects Lifetime::unpin(const CarriedRef& carried, const WorkerLife& receiver) {
  base::MutexLock lock(mutex_);
  TableEffects effects;
  if (receiver == self_) {
    if (leaving_) return {};
    if (owned_here(carried.id)) {
      owners_.drop_local(carried.id, effects);
    } else {
      holders_.drop_local(carried.id, effects);
    }
  } else if (carried.pinned) {
    const auto peer = peers_.find(receiver);  // it may have been swept meanwhile
    if (peer != peers_.end() && peer->second.tokens.erase(carried.token) > 0)
      drop_pin(carried.id, effects);
  }
  return pack(std::move(effects));
}

void Lifetime::set_world(World world) {
  base::MutexLock lock(mutex_);
  world_ = std::move(world);
}

bool Lifetime::owned_here(const RRefId& id) const {
  return owners_.contains(id) && !holders_.contains(id);
}

Effects Lifetime::receive(const CarriedRef& carried, const WorkerLife& sender,
                          const std::optional<Error>& lost_there) {
  base::MutexLock lock(mutex_);
  if (sender == self_) return {};  // pin() counted it
  TableEffects effects;
  if (leaving_) {  // it will not be used here
    if (carried.pinned) effects.ops.push_back({sender, LedgerOp::make_settle(carried.token)});
    return pack(std::move(effects));
  }
  const bool may_be_here =
      owners_.contains(carried.id) || (!carried.lost && !why_never(carried.id));
  if (!holders_.contains(carried.id) && may_be_here && owners_.receive(carried.id, sender)) {
    if (carried.pinned) effects.ops.push_back({sender, LedgerOp::make_settle(carried.token)});
    return pack(std::move(effects));
  }
  std::optional<Error> lost = loss_of(carried.id);
  if (carried.lost && carried.id.owner == self_ && carried.id.creator == sender &&
      !owners_.contains(carried.id) && !owners_.deleted(carried.id)) {
    lost = Error(ErrorCode::cancelled,
                 to_string(carried.id) + " was not created: its creator could not ask for it");
  }
  if (!lost && carried.lost)
    lost = lost_there.value_or(Error(ErrorCode::disconnected,
                                     to_string(carried.id) + " was lost before it was sent here"));
  // What a worker that is over has lent protects nothing any more.
  const bool pinned = carried.pinned && !sweeps_.over(sender);
  if (carried.pinned && !pinned && !lost) lost = gone_.at(sender);
  holders_.receive(carried.id, {sender, carried.token, pinned, carried.created}, lost, effects);
  return pack(std::move(effects));
}

Effects Lifetime::message_done(const RRefId& id, const WorkerLife& sender) {
  base::MutexLock lock(mutex_);
  TableEffects effects;
  if (leaving_) return {};
  if (owned_here(id)) {
    owners_.drop_local(id, effects);
  } else if (sender == self_) {
    holders_.drop_local(id, effects);
  } else {
    holders_.message_done(id, effects);
  }
  return pack(std::move(effects));
}

Effects Lifetime::register_kept() {
  base::MutexLock lock(mutex_);
  TableEffects effects;
  holders_.register_kept(effects);
  return pack(std::move(effects));
}

std::vector<WorkerLife> Lifetime::due() const {
  base::MutexLock lock(mutex_);
  std::vector<WorkerLife> due;
  for (const auto& [peer, state] : peers_) {
    if (!state.ledger.empty()) due.push_back(peer);
  }
  return due;
}

bool Lifetime::encode_ledger(const WorkerLife& peer, base::Bytes& out) {
  base::MutexLock lock(mutex_);
  const auto found = peers_.find(peer);
  return found != peers_.end() && found->second.ledger.encode(out);
}

Effects Lifetime::accept_ledger(const WorkerLife& peer, std::span<const std::byte> frame) {
  base::MutexLock lock(mutex_);
  TableEffects effects;
  if (gone_.contains(peer)) return {};
  try {
    for (const LedgerOp& op : Ledger::decode(frame)) apply(op, peer, effects);
  } catch (const Error& error) {
    effects.broken = error;
  }
  return pack(std::move(effects));
}

Effects Lifetime::pack(TableEffects effects) {
  for (const TableEffects::Op& op : effects.ops) {
    if (gone_.contains(op.to)) continue;
    peers_[op.to].ledger.push(op.op);
    effects.flush = true;
  }
  return std::move(static_cast<Effects&>(effects));
}

void Lifetime::drop_pin(const RRefId& id, TableEffects& effects) {
  if (owners_.contains(id)) {
    owners_.unpin(id, effects);
  } else {
    holders_.unpin(id, effects);
  }
}

void Lifetime::apply(const LedgerOp& op, const WorkerLife& peer, TableEffects& effects) {
  using Kind = LedgerOp::Kind;
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorCode::protocol,
                "reference ledger: worker " + std::to_string(peer.id) + " " + why);
  };
  switch (op.kind) {
    case Kind::reg:
    case Kind::drop:
    case Kind::unmade:
      if (op.id.owner != self_) refuse("names " + to_string(op.id) + " to another worker");
      break;
    case Kind::registered:
    case Kind::gone:
      if (op.id.owner != peer) refuse("does not own " + to_string(op.id));
      break;
    default:
      break;
  }
  switch (op.kind) {
    case Kind::settle:
      return settle(op, peer, effects);
    case Kind::reg:
      // A third worker may have lent a reference to what is not here: nothing but GONE follows.
      effects.ops.push_back({peer, !why_never(op.id) && owners_.add_holder(op.id, peer)
                                       ? LedgerOp::make_registered(op.id)
                                       : LedgerOp::make_gone(op.id)});
      return;
    case Kind::drop:
      return owners_.drop_holder(op.id, peer, effects);
    case Kind::unmade:
      if (op.id.creator != peer) refuse("did not create " + to_string(op.id));
      return owners_.not_requested(
          op.id, Error(ErrorCode::cancelled, "its creator could not send the request"), effects);
    case Kind::registered:
      return holders_.registered(op.id, effects);
    case Kind::gone:
      return holders_.gone(
          op.id, Error(ErrorCode::disconnected, to_string(op.id) + " is gone at its owner"),
          effects);
    case Kind::sweep:
    case Kind::clean:
    case Kind::ask:
    case Kind::swept:
      if (op.life == peer) refuse("says that it is over itself");
      return apply_sweep(op, peer, effects);
  }
}

void Lifetime::settle(const LedgerOp& op, const WorkerLife& peer, TableEffects& effects) {
  const auto found = peers_.find(peer);
  const std::uint64_t sent = found == peers_.end() ? 0 : found->second.next_token;
  if (op.first_token + op.tokens > sent) {
    throw Error(ErrorCode::protocol, "reference ledger: settles token " +
                                         std::to_string(op.first_token + op.tokens - 1) + ", " +
                                         std::to_string(sent) + " were sent");
  }
  auto& tokens = found->second.tokens;
  auto at = tokens.lower_bound(op.first_token);
  while (at != tokens.end() && at->first - op.first_token < op.tokens) {
    drop_pin(at->second, effects);
    at = tokens.erase(at);
  }
}

// ---- ends of lives

Effects Lifetime::peer_lost(const WorkerLife& peer, const Error& why) {
  base::MutexLock lock(mutex_);
  TableEffects effects;
  lose(peer, why, effects);
  return pack(std::move(effects));
}

Effects Lifetime::member_over(const WorkerLife& peer, const Error& why) {
  base::MutexLock lock(mutex_);
  TableEffects effects;
  end_life(peer, why, effects);
  hear_of(peer, effects);
  return pack(std::move(effects));
}

bool Lifetime::over(const WorkerLife& life) const {
  base::MutexLock lock(mutex_);
  return sweeps_.over(life);
}

bool Lifetime::lost(const RRefId& id) const {
  base::MutexLock lock(mutex_);
  if (const auto hold = holders_.status(id)) return hold->state == HolderTable::State::lost;
  return gone_.contains(id.owner);
}

std::optional<Error> Lifetime::loss_of(const RRefId& id) const {
  const auto gone = gone_.find(id.owner);
  if (gone != gone_.end()) return gone->second;
  if (id.creator == self_ && id.owner != self_) {
    const auto issued = next_k_.find(id.owner);
    if (issued == next_k_.end() || id.k >= issued->second)
      return Error(ErrorCode::disconnected, to_string(id) + " was never created");
  }
  if (id.owner.id != self_.id) return std::nullopt;
  if (auto never = why_never(id)) return never;
  if (id.owner.epoch == self_.epoch)
    return Error(ErrorCode::disconnected, to_string(id) + " is gone");
  return Error(ErrorCode::disconnected, "worker " + std::to_string(id.owner.id) + " epoch " +
                                            std::to_string(id.owner.epoch) +
                                            " is gone; it is now epoch " +
                                            std::to_string(self_.epoch));
}

Effects Lifetime::member_joined(const WorkerLife& life) {
  base::MutexLock lock(mutex_);
  TableEffects effects;
  if (life != self_) ask(sweeps_.joined(life), effects);
  // Its former lives that were never heard of are over.
  for (const WorkerLife& creator : owners_.former_creators(life))
    owners_.creator_lost(creator, error_of_ended(creator).with_prefix(kNoCreator), effects);
  hear_of(life, effects);
  return pack(std::move(effects));
}

// A creator that is not known may have joined through a worker that could not tell this one: then
// the news is on its way, and its request to create the object waits for that as well.
std::optional<Error> Lifetime::why_never(const RRefId& id) const {
  if (id.owner != self_ || id.creator == self_ || owners_.contains(id)) return std::nullopt;
  if (const auto gone = gone_.find(id.creator); gone != gone_.end())
    return gone->second.with_prefix(kNoCreator);
  if (passed(id.creator)) return error_of_ended(id.creator).with_prefix(kNoCreator);
  return std::nullopt;
}

// Nothing more is expected from the peer or sent to it. Pins towards it, and what it holds, stay:
// it may have lent that on.
void Lifetime::lose(const WorkerLife& peer, const Error& why, TableEffects& effects) {
  if (!gone_.emplace(peer, why).second) return;
  unheard_.erase(peer);
  for (auto at = asked_early_.begin(); at != asked_early_.end();) {
    at->second.erase(peer);
    at = at->second.empty() ? asked_early_.erase(at) : std::next(at);
  }
  sweeps_.forget(peer);
  const auto found = peers_.find(peer);
  if (found != peers_.end()) {
    found->second.ledger = Ledger();
  }
  holders_.owner_lost(peer, why, effects);
  owners_.creator_lost(peer, why.with_prefix(kNoCreator), effects);
}

void Lifetime::end_life(const WorkerLife& over, const Error& why, TableEffects& effects) {
  if (over == self_ || !sweeps_.add(over)) return;
  lose(over, why, effects);
  // Its own objects: there is nothing to protect.
  holders_.owner_over(over, effects);
  std::vector<WorkerLife> receivers;
  for (const auto& [receiver, state] : peers_) receivers.push_back(receiver);
  for (const WorkerLife& receiver : receivers) void_pins(receiver, over, effects);
  // Objects of others: what was borrowed from it is registered before any owner may hear that this
  // worker is clean (G3), and owners are asked when pins towards it may go.
  holders_.register_borrowed_from(over, effects);
  if (const auto found = peers_.find(over); found != peers_.end()) {
    std::set<WorkerLife> owners;
    for (const auto& [token, id] : found->second.tokens) owners.insert(id.owner);
    owners.erase(self_);
    for (const WorkerLife& owner : owners) effects.ops.push_back({owner, LedgerOp::make_ask(over)});
  }
  answer_early(over, effects);
  // Objects of this worker. While none is lent, no sweep is needed; it is made up for as soon as
  // another one is, since that may depend on it.
  if (owners_.lent() || sweeps_.running() || sweeps_.wanted()) start_sweeps(effects);
  finish_sweeps(effects);
}

bool Lifetime::passed(const WorkerLife& life) const {
  if (!world_.contains || world_.contains(life)) return false;
  if (life.id == self_.id) return life.epoch < self_.epoch;
  if (sweeps_.later_over(life)) return true;
  const std::vector<WorkerLife> known = live();
  return std::any_of(known.begin(), known.end(), [&](const WorkerLife& each) {
    return each.id == life.id && each.epoch > life.epoch;
  });
}

bool Lifetime::note_unheard(const WorkerLife& life, const WorkerLife& peer) {
  constexpr std::size_t kMaxUnheard = 4096;  // more than end while the news of it is on its way
  std::set<WorkerLife>& named = unheard_[peer];
  if (named.size() >= kMaxUnheard) return named.contains(life);
  named.insert(life);
  return true;
}

void Lifetime::hear_of(const WorkerLife& life, TableEffects& effects) {
  std::set<WorkerLife> earlier;
  for (auto& [peer, named] : unheard_) {
    const auto first = named.lower_bound({life.id, 0}), last = named.upper_bound(life);
    earlier.insert(first, last);
    named.erase(first, last);
  }
  earlier.erase(life);
  for (const WorkerLife& each : earlier) {
    if (sweeps_.wanted(each)) {
      end_life(each, error_of_ended(each), effects);
    } else {
      answer_early(each, effects);
    }
  }
}

void Lifetime::answer_early(const WorkerLife& over, TableEffects& effects) {
  const auto asked = asked_early_.extract(over);
  if (!asked) return;
  for (const WorkerLife& by : asked.mapped())
    effects.ops.push_back({by, LedgerOp::make_clean(over)});
}

std::vector<WorkerLife> Lifetime::live() const {
  std::vector<WorkerLife> live;
  if (world_.live) live = world_.live();
  std::erase(live, self_);
  return live;
}

Error Lifetime::error_of_ended(const WorkerLife& life) const {
  if (world_.gone) return world_.gone(life);
  return Error(ErrorCode::disconnected, "worker " + std::to_string(life.id) + " epoch " +
                                            std::to_string(life.epoch) + " is gone");
}

void Lifetime::ask(const std::vector<Sweeps::Question>& questions, TableEffects& effects) {
  for (const Sweeps::Question& each : questions)
    effects.ops.push_back({each.to, LedgerOp::make_sweep(each.over)});
}

void Lifetime::start_sweeps(TableEffects& effects) { ask(sweeps_.start(live()), effects); }

void Lifetime::finish_sweeps(TableEffects& effects) {
  for (const Sweeps::Swept& each : sweeps_.finish()) {
    owners_.drop_life(each.over, effects);
    void_pins(each.over, self_, effects);
    for (const WorkerLife& by : each.wanted_by)
      effects.ops.push_back({by, LedgerOp::make_swept(each.over)});
  }
}

void Lifetime::void_pins(const WorkerLife& receiver, const WorkerLife& owner,
                         TableEffects& effects) {
  const auto found = peers_.find(receiver);
  if (found == peers_.end()) return;
  auto& tokens = found->second.tokens;
  for (auto at = tokens.begin(); at != tokens.end();) {
    if (at->second.owner == owner) {
      drop_pin(at->second, effects);
      at = tokens.erase(at);
    } else {
      ++at;
    }
  }
  if (tokens.empty() && sweeps_.over(receiver)) peers_.erase(found);
}

void Lifetime::apply_sweep(const LedgerOp& op, const WorkerLife& peer, TableEffects& effects) {
  switch (op.kind) {
    case LedgerOp::Kind::sweep:
      // If it is about this worker, its answer is not waited for any more.
      if (op.life == self_) return;
      if (!world_.contains) {
        end_life(op.life, error_of_ended(op.life), effects);
      } else if (!sweeps_.over(op.life) && !passed(op.life)) {
        // The question is sent once the end of that life has been declared, and may come before the
        // news, also before that of its beginning. A peer's word ends no life that is a member
        // here, or may become one: the answer waits for the news.
        if (world_.contains(op.life) || note_unheard(op.life, peer))
          asked_early_[op.life].insert(peer);
        return;
      }
      // Nothing was borrowed from a life that was never known here.
      effects.ops.push_back({peer, LedgerOp::make_clean(op.life)});
      return;
    case LedgerOp::Kind::clean:
      sweeps_.clean(op.life, peer);
      finish_sweeps(effects);
      return;
    case LedgerOp::Kind::ask:
      if (!sweeps_.over(op.life) && world_.contains && !world_.contains(op.life)) {
        if (!note_unheard(op.life, peer)) return;
        if (passed(op.life)) end_life(op.life, error_of_ended(op.life), effects);
      }
      if (sweeps_.want(op.life, peer)) {
        effects.ops.push_back({peer, LedgerOp::make_swept(op.life)});
      } else if (sweeps_.over(op.life)) {  // else its sweep starts when this worker hears of it
        start_sweeps(effects);
        finish_sweeps(effects);
      }
      return;
    default:  // swept
      void_pins(op.life, peer, effects);
      return;
  }
}

Effects Lifetime::leave(const Error& why) {
  base::MutexLock lock(mutex_);
  TableEffects effects;
  if (leaving_) return {};
  leaving_ = why;
  holders_.drop_all_handles(effects);
  owners_.drop_all_handles(effects);
  return pack(std::move(effects));
}

Effects Lifetime::close() {
  base::MutexLock lock(mutex_);
  TableEffects effects;
  if (!leaving_) leaving_ = Error(ErrorCode::shutting_down, "this worker has shut down");
  owners_.clear(*leaving_, effects);
  for (const auto& [peer, state] : peers_) gone_.emplace(peer, *leaving_);
  Effects packed = pack(std::move(effects));
  peers_.clear();
  return packed;
}

// ---- numbers and lists

Lifetime::Status Lifetime::status(const RRefId& id) const {
  base::MutexLock lock(mutex_);
  if (leaving_) return {false, false, leaving_};
  if (owned_here(id)) return {true, true, std::nullopt};
  const auto hold = holders_.status(id);
  if (!hold) return {false, false, Error(ErrorCode::internal, to_string(id) + " is not held here")};
  if (hold->state == HolderTable::State::lost) return {false, false, hold->error};
  return {false, hold->created || hold->state == HolderTable::State::registered, std::nullopt};
}

std::optional<OwnerTable::Status> Lifetime::owned(const RRefId& id) const {
  base::MutexLock lock(mutex_);
  return owners_.status(id);
}

bool Lifetime::owns(const RRefId& id) const {
  base::MutexLock lock(mutex_);
  return owners_.contains(id);
}

Lifetime::Counts Lifetime::counts() const {
  base::MutexLock lock(mutex_);
  Counts counts;
  counts.owned = owners_.counts();
  counts.held = holders_.counts();
  counts.entries = owners_.size();
  counts.holds = holders_.size();
  for (const auto& [peer, state] : peers_) {
    counts.tokens += state.tokens.size();
    counts.ledger_unsent += state.ledger.unsent();
  }
  counts.unswept = sweeps_.unswept().size();
  return counts;
}

std::vector<ListedRef> Lifetime::list() const {
  base::MutexLock lock(mutex_);
  std::vector<ListedRef> all;
  all.reserve(owners_.size() + holders_.size());
  for (auto& [id, status] : owners_.list()) all.push_back({id, std::move(status), std::nullopt});
  for (auto& [id, status] : holders_.list()) all.push_back({id, std::nullopt, std::move(status)});
  return all;
}

}  // namespace stitch::rref
