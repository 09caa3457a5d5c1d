// One file, though long: how a MembershipProtocol suspects and decides, that is what becomes of a
// life whose connection is over, is one chain of steps.
#include "stitch/rpc/membership/membership_protocol.h"

#include <algorithm>
#include <utility>

#include "stitch/rpc/message/life_text.h"

namespace stitch::rpc {

namespace {

// A worker that decides and has lost its connection to a life with a lower id that still answers
// declares it dead after so many timeouts: that one comes first; ...
constexpr int kLowerFirst = 3;
// ... and if it is itself the likely cause, after so many: the others come first.
constexpr int kOthersFirst = 6;
// How many others are asked whether they hear a life to which there was never a connection here.
constexpr int kWitnesses = 3;
// The limit of the second probe of such a life, in timeouts.
constexpr int kSecondProbe = 2;

std::string verdict_text(const WorkerInfo& about, const WorkerInfo& by, const std::string& why) {
  return life_text(about) + " was declared dead by " + to_string(by) + ": " + why;
}

}  // namespace

MembershipProtocol::MembershipProtocol(MemberCard self, Settings settings)
    : self_(std::move(self)), settings_(std::move(settings)) {}

void MembershipProtocol::start(std::span<const KnownLife> lives) {
  for (const KnownLife& life : lives) {
    if (life.card.info.id != self_.info.id) insert(life);
  }
}

// ---- suspicion

void MembershipProtocol::tell_all(const Notice& notice, Effects& effects) const {
  for (const auto& [id, entry] : entries_) {
    if (entry.within_reach()) effects.send.emplace_back(entry.info(), notice);
  }
}

void MembershipProtocol::lose(Entry& entry, const Error& reason, Effects& effects) {
  if (entry.unreachable) return;
  effects.lose.emplace_back(entry.info(), reason);
  entry.unreachable = reason;
}

// What depended on a link to `lost`.
void MembershipProtocol::after_loss(const WorkerInfo& lost, Time now, Effects& effects) {
  for (auto& [ticket, joining] : joining_) joining.pending.erase(lost.id);
  leave_pending_.erase(lost.id);
  for (auto& [id, entry] : entries_) {
    // It may have died while it told the others of a verdict.
    if (!entry.relayed && entry.by == lost.id) {
      if (const auto notice = obituary(entry.info())) tell_all(*notice, effects);
      entry.relayed = true;
    }
    entry.askers.erase(lost.id);
    if (entry.asked == lost.id) {
      entry.asked.reset();
      if (entry.suspected()) pursue(entry, now, effects);
    }
  }
}

// The lowest id within reach, of this worker and the others.
WorkerId MembershipProtocol::lowest(const Entry* but_for, bool absent_too) const {
  WorkerId lowest = self_.info.id;
  for (const auto& [id, other] : entries_) {
    if (&other == but_for || (other.absent && !absent_too)) continue;
    if (id < lowest && other.within_reach()) lowest = id;
  }
  return lowest;
}

// The live worker with the lowest id decides: asks it, or decides here.
void MembershipProtocol::pursue(Entry& entry, Time now, Effects& effects) {
  // One that leaves loses its connections for that.
  if (entry.probing || !entry.suspected() || leaving_) return;
  entry.undecided = false;
  const WorkerId decider = judge_of(entry);
  if (decider == self_.info.id || is_awaited(entry)) {
    entry.asked.reset();
    return begin_probe(entry, now, effects);
  }
  if (const Entry* judge = find(decider); judge->unconnected) {
    // The question would end a first connection that fails for good. It waits for that connection,
    // or until the judge is absent.
    entry.asked.reset();
    entry.asked_at = {};
    effects.reach.push_back(judge->info());
    return;
  }
  if (entry.asked == decider && now < entry.asked_at + kAskAgain * settings_.heartbeat_timeout)
    return;
  effects.send.emplace_back(
      find(decider)->info(),
      Notice{Notice::Step::suspect, entry.info(), self_.info,
             entry.unreachable ? entry.unreachable->what() : "another worker suspects it"});
  entry.asked = decider;
  entry.asked_at = now;
}

void MembershipProtocol::begin_probe(Entry& entry, Time now, Effects& effects) {
  effects.probes.push_back(
      {entry.info(), (entry.doubted ? kSecondProbe : 1) * settings_.heartbeat_timeout});
  entry.probing = true;
  entry.probed_at = now;
  ask_witnesses(entry, now, effects);
}

// Whether others hear a life that is being probed here and to which there was no connection yet.
void MembershipProtocol::ask_witnesses(const Entry& entry, Time now, Effects& effects) const {
  if (!entry.probing || !entry.unconnected || entry.unreachable) return;
  int asked = 0;
  for (const auto& [id, other] : entries_) {
    if (asked == kWitnesses) break;
    if (id < self_.info.id || &other == &entry || !other.within_reach() || other.absent) continue;
    ++asked;
    if (other.unconnected) effects.reach.push_back(other.info());  // to be asked then
    if (!hears(other, now)) continue;
    effects.send.emplace_back(
        other.info(), Notice{Notice::Step::suspect, entry.info(), self_.info,
                             "there was no connection to it yet, and it has to answer a probe"});
  }
}

bool MembershipProtocol::hears(const Entry& entry, Time now) const {
  return !entry.unreachable && entry.heard != Time{} &&
         now - entry.heard < settings_.heartbeat_timeout;
}

bool MembershipProtocol::is_awaited(const Entry& entry) const {
  return std::ranges::any_of(joining_, [&](const auto& each) {
    return !each.second.announced && each.second.card.info.id == entry.info().id;
  });
}

bool MembershipProtocol::slept(const Entry& entry, Time now) const {
  return (last_tick_ && now - *last_tick_ > settings_.heartbeat_timeout / 2) ||
         awake_since_ > entry.probed_at;
}

void MembershipProtocol::settle_askers(Entry& entry, const Notice& answer, Effects& effects) {
  for (const WorkerId id : std::exchange(entry.askers, {})) {
    if (const Entry* asker = find(id); asker != nullptr && asker->within_reach())
      effects.send.emplace_back(asker->info(), answer);
  }
}

// Whether this worker, which decides, declares a life dead that answers a probe: nothing can be
// said to it any more once the connection is over for good.
bool MembershipProtocol::gives_up(Entry& entry, Time now) const {
  if (!entry.unreachable) return false;
  if (!entry.answers_since) entry.answers_since = now;
  const auto timeout = settings_.heartbeat_timeout;
  const auto waited = now - *entry.answers_since;
  int linked = 1;
  int lost = 0;
  for (const auto& [id, other] : entries_) {
    if (other.alive() && other.unreachable) ++lost;
    if (other.within_reach() && other.heard != Time{}) ++linked;
  }
  // This process did not run for a while, or it has lost most of the others.
  const bool pauses = last_tick_ && now - *last_tick_ > timeout / 2;
  const bool paused = pauses || (awake_since_ != Time{} &&
                                 *entry.answers_since < awake_since_ + kAskAgain * timeout);
  const bool cause = paused || lost > linked;
  if (cause) return entry.info().id > self_.info.id && waited >= kOthersFirst * timeout;
  return waited >= (entry.info().id < self_.info.id ? kLowerFirst : kGivesUp) * timeout;
}

void MembershipProtocol::declare(Entry& entry, const WorkerInfo& by, const std::string& verdict,
                                 Time now, Effects& effects) {
  if (!entry.alive()) return;
  const Error reason = Error(ErrorCode::disconnected, verdict).with_worker(entry.info().name);
  lose(entry, reason, effects);
  effects.events.push_back({Event::Kind::dead, entry.life.card, reason});
  end_life(entry, LifeState::dead);
  entry.life.verdict = verdict;
  entry.probing = false;
  entry.askers.clear();
  entry.asked.reset();
  entry.by = by.id;
  const Entry* judge = find(by);
  // All have to hear of it, also when the worker that decided dies before it has told them all.
  entry.relayed = by.id == self_.info.id || judge == nullptr || !judge->within_reach();
  if (entry.relayed) tell_all({Notice::Step::dead, entry.info(), by, verdict}, effects);
  after_loss(entry.info(), now, effects);
}

void MembershipProtocol::mark_left(Entry& entry, Time now, Effects& effects) {
  if (!entry.alive()) return;
  lose(entry,
       Error(ErrorCode::disconnected, life_text(entry.info()) + " has left")
           .with_worker(entry.info().name),
       effects);
  effects.events.push_back({Event::Kind::left, entry.life.card, {}});
  end_life(entry, LifeState::left);
  entry.askers.clear();
  entry.asked.reset();
  after_loss(entry.info(), now, effects);
}

void MembershipProtocol::fence(const std::string& verdict, Effects& effects) {
  if (fenced_) return;
  const Error why =
      Error(ErrorCode::disconnected, "this worker (epoch " + std::to_string(self_.info.epoch) +
                                         ") was declared dead: " + verdict)
          .with_worker(self_.info.name);
  for (auto& [id, entry] : entries_) {
    if (entry.alive()) lose(entry, why, effects);
  }
  for (const auto& [ticket, joining] : std::exchange(joining_, {}))
    effects.answers.push_back({ticket, ask_another(joining.card.info, why.what())});
  effects.events.push_back({Event::Kind::fenced, self_, why});
  fenced_ = why;
  effects.leave_done = leave_deadline_.has_value();
}

// ---- events

void MembershipProtocol::on_link_lost(const WorkerInfo& peer, const Error& reason, Time now,
                                      Effects& effects) {
  Entry* entry = find(peer);
  if (over() || entry == nullptr || !entry->within_reach()) return;
  entry->unreachable = reason;
  after_loss(peer, now, effects);
  if (leave_deadline_) {
    finish_leave(effects);
  } else {
    pursue(*entry, now, effects);
  }
  answer_joins(now, effects);
}

void MembershipProtocol::on_probe(const WorkerInfo& about, std::optional<bool> answered, Time now,
                                  bool connected, Effects& effects) {
  Entry* entry = find(about);
  if (over() || entry == nullptr || !entry->alive()) return;
  if (std::exchange(entry->confirming, false) && !entry->probing) return;
  entry->probing = false;
  const bool failed = answered.has_value() && !*answered;
  const bool met = failed && entry->unconnected && connected;  // since the last tick
  const bool asleep = failed && !met && slept(*entry, now);    // perhaps the reason
  const bool lives = answered.value_or(false) || met;
  const bool silent = failed && !met && !asleep;
  entry->undecided = !lives && !silent;
  entry->asked_at = now;
  const auto refuse_joins = [&](const std::string& why) {
    for (auto each = joining_.begin(); each != joining_.end();) {
      const auto& [ticket, joining] = *each;
      if (joining.announced || joining.card.info.id != about.id) {
        ++each;
        continue;
      }
      effects.answers.push_back(
          {ticket, {Notice::Step::refusal, joining.card.info, self_.info, why}});
      each = joining_.erase(each);
    }
  };
  // It may have begun the probe as the judge and be none any more, or for a new life only.
  const bool decides = !leaving_ && judge_of(*entry) == self_.info.id;
  // A judge that is absent may have a connection to it.
  const bool first = decides && lowest(entry, true) == self_.info.id;
  const bool cut_off = lives && first && gives_up(*entry, now);
  if (lives && !cut_off) {
    end_doubt(*entry);
    settle_askers(*entry, {Notice::Step::alive, about, self_.info}, effects);
    refuse_joins(to_refusal_text(Error(
        ErrorCode::already_exists,
        "worker \"" + about.name + "\" is still alive in epoch " + std::to_string(about.epoch))));
    return;
  }
  // What goes over the link proves more than a connection that could not be made.
  if (silent && hears(*entry, now)) {
    // A process that has just ended: the end of its link is pursued. New lives wait for that.
    entry->askers.insert(self_.info.id);
    return;
  }
  if (entry->undecided) {
    // A new life waits, and asks the next member when that takes too long.
    if (is_awaited(*entry)) entry->askers.insert(self_.info.id);
    return;  // again after a while
  }
  const bool awaited = is_awaited(*entry);
  if (!decides && !awaited) {  // the judge is asked
    entry->askers.insert(self_.info.id);
    pursue(*entry, now, effects);
    return;
  }
  if (entry->unconnected && !entry->unreachable && !awaited) {
    if (!entry->suspected()) return;  // another worker hears it
    if (!std::exchange(entry->doubted, true)) return;
  }
  std::string why = entry->unreachable ? entry->unreachable->what() : "it does not answer";
  if (cut_off) why = "it runs, but the connection between these two is over: " + why;
  declare(*entry, self_.info, verdict_text(about, self_.info, why), now, effects);
  if (cut_off) effects.probes.push_back({about, settings_.heartbeat_timeout});  // that tells it
  // Of several new lives that have waited for this, the last one joins.
  Joining* last = nullptr;
  for (auto& [ticket, joining] : joining_) {
    if (joining.announced || joining.card.info.id != about.id) continue;
    if (last == nullptr || last->card.info.epoch < joining.card.info.epoch) last = &joining;
  }
  if (last != nullptr) announce(*last, now, effects);
  answer_joins(now, effects);  // the others are told which one has joined
}

void MembershipProtocol::on_notice(const WorkerInfo& from, const Notice& notice, Time now,
                                   Effects& effects) {
  Entry* sender = find(from);
  // What a dead life says is not heard.
  if (over() || sender == nullptr || !sender->alive()) return;
  switch (notice.step) {
    case Notice::Step::suspect:
      on_suspect(from, notice, now, effects);
      break;
    case Notice::Step::alive:
      if (Entry* entry = find(notice.about); entry != nullptr && entry->alive()) {
        entry->asked.reset();
        entry->asked_at = now;
        end_doubt(*entry);
        settle_askers(*entry, notice, effects);
        // Only this link is down; or that worker has declared this one dead, and says so.
        if (entry->unreachable && !entry->probing && !entry->confirming) {
          effects.probes.push_back({entry->info(), settings_.heartbeat_timeout});
          entry->confirming = true;
        }
      }
      break;
    case Notice::Step::dead:
      on_dead(from, notice, now, effects);
      break;
    case Notice::Step::member:
      add(notice.lives[0], from, now, effects);
      if (const auto over = obituary(notice.lives[0].card.info))
        effects.send.emplace_back(from, *over);
      effects.send.emplace_back(from,
                                Notice{Notice::Step::known, notice.lives[0].card.info, self_.info});
      break;
    case Notice::Step::known:
      acknowledged(from.id, notice.about);
      break;
    case Notice::Step::left:
      if (Entry* entry = find(notice.about)) {
        // The end of the connection tells the one that leaves that it may.
        mark_left(*entry, now, effects);
      }
      break;
    case Notice::Step::list:
      merge(notice.lives, from, now, effects);
      break;
    case Notice::Step::join:
    case Notice::Step::welcome:
    case Notice::Step::refusal:
      break;  // over connections of their own
  }
  answer_joins(now, effects);
}

void MembershipProtocol::on_suspect(const WorkerInfo& from, const Notice& notice, Time now,
                                    Effects& effects) {
  if (const auto over = obituary(notice.about)) {
    effects.send.emplace_back(from, *over);
    return;
  }
  Entry* entry = find(notice.about);
  if (entry == nullptr || entry->info() == from) return;
  if (from.id < self_.info.id) {  // that one decides, and asks for what this one knows
    if (entry->alive() && hears(*entry, now))
      effects.send.emplace_back(from, Notice{Notice::Step::alive, entry->info(), self_.info});
    return;
  }
  entry->askers.insert(from.id);
  pursue(*entry, now, effects);
}

void MembershipProtocol::on_dead(const WorkerInfo& from, const Notice& notice, Time now,
                                 Effects& effects) {
  const WorkerInfo& about = notice.about;
  if (about.id == self_.info.id) {
    if (about.epoch == self_.info.epoch) fence(notice.text, effects);
    return;
  }
  Entry* entry = find(about.id);
  if (entry != nullptr && entry->info().epoch == about.epoch) {
    declare(*entry, notice.by, notice.text, now, effects);
  } else {
    add({{about, {}, {}}, LifeState::dead, notice.text}, from, now, effects);
  }
}

}  // namespace stitch::rpc
