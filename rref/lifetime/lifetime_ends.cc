// What happens when workers end: others, which are swept, and this one.
#include <algorithm>
#include <iterator>
#include <set>
#include <string>
#include <utility>

#include "stitch/rref/lifetime/lifetime.h"

namespace stitch::rref {

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

std::optional<Error> Lifetime::why_lost(const RRefId& id) const {
  const auto gone = gone_.find(id.owner);
  if (gone != gone_.end()) return gone->second;
  if (id.owner.id != self_.id) return std::nullopt;
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
  while (!unknown_creators_.empty()) {
    const auto at = unknown_creators_.lower_bound({life.id, 0});
    if (at == unknown_creators_.end() || at->id != life.id || at->epoch > life.epoch) break;
    const WorkerLife creator = *at;
    unknown_creators_.erase(at);
    if (creator != life) lose(creator, gone_error(creator), effects);
  }
  hear_of(life, effects);
  return pack(std::move(effects));
}

// It may have joined through a worker that could not tell this one: then the news is on its way,
// and its request to create the object waits for that as well.
void Lifetime::meet_creator(const RRefId& id, TableEffects& effects) {
  const WorkerLife& creator = id.creator;
  if (id.owner != self_ || creator == self_ || owners_.contains(id) || gone_.contains(creator))
    return;
  if (!world_.contains || world_.contains(creator)) return;
  for (const WorkerLife& each : live()) {
    if (each.id == creator.id && each.epoch > creator.epoch)
      return lose(creator, gone_error(creator), effects);
  }
  constexpr std::size_t kMaxUnknown = 4096;  // more lives than join while news is on its way
  if (unknown_creators_.size() >= kMaxUnknown && !unknown_creators_.contains(creator)) {
    throw Error(ErrorCode::protocol, to_string(id) +
                                         " was created by a worker that is not known, as were " +
                                         std::to_string(kMaxUnknown) + " before it");
  }
  unknown_creators_.insert(creator);
}

// Nothing more is expected from it or sent to it. Pins towards it stay: it may have lent on what it
// was lent, and what it holds stays, because it may have lent that.
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
    note_due(found->second);
  }
  holders_.owner_lost(peer, why, effects);
  owners_.creator_lost(peer, why.with_prefix("its creator died before creation"), effects);
}

void Lifetime::end_life(const WorkerLife& over, const Error& why, TableEffects& effects) {
  if (over == self_ || !sweeps_.add(over)) return;
  unknown_creators_.erase(over);
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

void Lifetime::note_unheard(const WorkerLife& life, const WorkerLife& peer) {
  constexpr std::size_t kMaxUnheard = 4096;  // more than end while the news of it is on its way
  std::set<WorkerLife>& named = unheard_[peer];
  if (named.size() >= kMaxUnheard && !named.contains(life)) {
    throw Error(ErrorCode::protocol,
                "reference ledger: worker " + std::to_string(peer.id) + " asks about worker " +
                    std::to_string(life.id) + " epoch " + std::to_string(life.epoch) +
                    ", which is not known, nor were " + std::to_string(kMaxUnheard) + " before it");
  }
  named.insert(life);
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
      end_life(each, gone_error(each), effects);
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

Error Lifetime::gone_error(const WorkerLife& life) const {
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

void Lifetime::apply_gone(const RRefId& id, const WorkerLife& peer, TableEffects& effects) {
  if (id.owner != peer)
    throw Error(ErrorCode::protocol, "reference ledger: worker " + std::to_string(peer.id) +
                                         " does not own " + to_string(id));
  const std::string why = " is gone: who lent it died before its owner knew this worker";
  holders_.deleted(id, Error(ErrorCode::disconnected, to_string(id) + why), effects);
}

void Lifetime::apply_sweep(const LedgerOp& op, const WorkerLife& peer, TableEffects& effects) {
  if (op.life == peer)
    throw Error(ErrorCode::protocol, "reference ledger: worker " + std::to_string(peer.id) +
                                         " says that it is over itself");
  switch (op.kind) {
    case LedgerOp::Kind::sweep:
      // If it is about this worker, its answer is not waited for any more.
      if (op.life == self_) return;
      if (!world_.contains) {
        end_life(op.life, gone_error(op.life), effects);
      } else if (!sweeps_.over(op.life) && !passed(op.life)) {
        // The question is sent once the end of that life has been declared, and may come before the
        // news, also before that of its beginning. A peer's word ends no life that is a member
        // here, or may become one: the answer waits for the news.
        if (!world_.contains(op.life)) note_unheard(op.life, peer);
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
        note_unheard(op.life, peer);
        if (passed(op.life)) end_life(op.life, gone_error(op.life), effects);
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
  due_peers_.store(0, std::memory_order_relaxed);
  return packed;
}

}  // namespace stitch::rref
