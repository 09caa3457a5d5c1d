// One file, though long: how a MembershipProtocol suspects and decides, that is what becomes of a
// life whose connection is over, is one chain of steps.
#include "stitch/rpc/membership/membership_protocol.h"

#include <algorithm>
#include <utility>

#include "stitch/base/hash.h"
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
    : self_(std::move(self)), settings_(std::move(settings)) {
  digest_of(self_.info.id) = summand(self_.info, false);
}

void MembershipProtocol::start(std::span<const KnownLife> lives) {
  for (const KnownLife& life : lives) {
    if (life.card.info.id != self_.info.id) insert(life);
  }
}

// ---- suspicion

// Over the connections that there are: others hear of it by digests once they have connected to
// their judge.
void MembershipProtocol::tell_all(const Notice& notice, Effects& effects) const {
  for (const auto& [id, entry] : entries_) {
    if (entry.within_reach() && !entry.unconnected) effects.send.emplace_back(entry.info(), notice);
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

void MembershipProtocol::answer_askers(Entry& entry, const Notice& answer, Effects& effects) {
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
  entry.life.verdict = verdict.substr(0, KnownLife::kMaxVerdict);
  bytes_ += entry.life.verdict.size();
  entry.probing = false;
  entry.askers.clear();
  entry.asked.reset();
  if (by.id == self_.info.id) tell_all({Notice::Step::dead, entry.info(), by, verdict}, effects);
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
    effects.answers.push_back({ticket, joining.card.info, {}, true});
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
  // It may have begun the probe as the judge and be none any more, or for a new life only.
  const bool decides = !leaving_ && judge_of(*entry) == self_.info.id;
  // A judge that is absent may have a connection to it.
  const bool first = decides && lowest(entry, true) == self_.info.id;
  const bool cut_off = lives && first && gives_up(*entry, now);
  if (lives && !cut_off) {
    end_doubt(*entry);
    answer_askers(*entry, {Notice::Step::alive, about, self_.info}, effects);
    return refuse_joins(about, effects);
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
  announce_last(about.id, now, effects);
  answer_joins(now, effects);  // the others are told which one has joined
}

void MembershipProtocol::refuse_joins(const WorkerInfo& alive, Effects& effects) {
  const Error why(ErrorCode::already_exists,
                  "worker \"" + alive.name + "\" is still alive in epoch " +
                      std::to_string(alive.epoch) +
                      "; another job that meets at the same place needs one of its own");
  for (auto each = joining_.begin(); each != joining_.end();) {
    const auto& [ticket, joining] = *each;
    if (joining.announced || joining.card.info.id != alive.id) {
      ++each;
      continue;
    }
    effects.answers.push_back({ticket, joining.card.info, why});
    each = joining_.erase(each);
  }
}

void MembershipProtocol::announce_last(WorkerId id, Time now, Effects& effects) {
  Joining* last = nullptr;
  for (auto& [ticket, joining] : joining_) {
    if (joining.announced || joining.card.info.id != id) continue;
    if (last == nullptr || last->card.info.epoch < joining.card.info.epoch) last = &joining;
  }
  if (last != nullptr) announce(*last, now, effects);
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
        answer_askers(*entry, notice, effects);
        // Only this link is down; or that worker has declared this one dead, and says so.
        if (entry->unreachable) confirm(*entry, effects);
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
      // The end of the connection tells the one that leaves that it may. Of others LISTs tell.
      if (notice.about == from) mark_left(*sender, now, effects);
      break;
    case Notice::Step::list:
      merge(notice.lives, from, now, effects);
      break;
  }
  answer_joins(now, effects);
}

void MembershipProtocol::confirm(Entry& entry, Effects& effects) {
  if (entry.probing || std::exchange(entry.confirming, true)) return;
  effects.probes.push_back({entry.info(), settings_.heartbeat_timeout});
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

// ---- the lives of the world

MembershipProtocol::Entry* MembershipProtocol::find(WorkerId id) {
  const auto found = entries_.find(id);
  return found == entries_.end() ? nullptr : &found->second;
}

MembershipProtocol::Entry* MembershipProtocol::find(const WorkerInfo& info) {
  Entry* entry = find(info.id);
  return entry != nullptr && entry->info().epoch == info.epoch ? entry : nullptr;
}

std::uint64_t MembershipProtocol::summand(const WorkerInfo& info, bool over) {
  return base::mix_bits(base::mix_bits(info.epoch + 1) + info.id.value() * 2 + (over ? 1 : 0));
}

void MembershipProtocol::insert(const KnownLife& life) {
  const auto [at, inserted] = entries_.try_emplace(life.card.info.id, Entry{life});
  if (!inserted) return;
  digest_of(at->first) += summand(life.card.info, !at->second.alive());
  ids_.emplace(life.card.info.name, life.card.info.id);
  bytes_ += bytes_of(life);
}

std::size_t MembershipProtocol::bytes_of(const KnownLife& life) {
  constexpr std::size_t kNumbers = 64;
  std::size_t bytes =
      kNumbers + life.card.info.name.size() + life.card.record.size() + life.verdict.size();
  for (const std::string& address : life.card.addresses) bytes += kNumbers + address.size();
  return bytes;
}

bool MembershipProtocol::may_keep(const KnownLife& life) const {
  const WorkerInfo& info = life.card.info;
  if ((info.id == self_.info.id) != (info.name == self_.info.name)) return false;
  const auto of_name = ids_.find(info.name);
  if (of_name != ids_.end() && of_name->second != info.id) return false;
  const auto of_id = entries_.find(info.id);
  if (of_id == entries_.end()) return bytes_ + bytes_of(life) <= kMaxBytes;
  const KnownLife& known = of_id->second.life;
  if (known.card.info.name != info.name) return false;
  return known.card.info.epoch == info.epoch ||
         bytes_ - bytes_of(known) + bytes_of(life) <= kMaxBytes;
}

void MembershipProtocol::erase(const Entry& entry) {
  const WorkerId id = entry.info().id;
  digest_of(id) -= summand(entry.info(), !entry.alive());
  bytes_ -= bytes_of(entry.life);
  ids_.erase(entry.info().name);
  entries_.erase(id);
}

void MembershipProtocol::end_life(Entry& entry, LifeState state) {
  std::uint64_t& digest = digest_of(entry.info().id);
  digest -= summand(entry.info(), !entry.alive());
  entry.life.state = state;
  digest += summand(entry.info(), !entry.alive());
  bytes_ -= bytes_of(entry.life);
  entry.life.card = MemberCard{entry.info(), {}, {}};  // no worker connects to it any more
  bytes_ += bytes_of(entry.life);
}

std::vector<KnownLife> MembershipProtocol::lives() const {
  std::vector<KnownLife> lives{{self_}};
  for (const auto& [id, entry] : entries_) lives.push_back(entry.life);
  std::sort(lives.begin(), lives.end(),
            [](const KnownLife& a, const KnownLife& b) { return a.card.info.id < b.card.info.id; });
  return lives;
}

std::vector<MemberCard> MembershipProtocol::live_cards() const {
  std::vector<MemberCard> cards;
  for (KnownLife& life : lives()) {
    if (life.state == LifeState::alive) cards.push_back(std::move(life.card));
  }
  return cards;
}

std::optional<LifeState> MembershipProtocol::state(const WorkerInfo& info) const {
  if (info.id == self_.info.id && info.epoch == self_.info.epoch) return LifeState::alive;
  const auto found = entries_.find(info.id);
  if (found == entries_.end() || found->second.info().epoch < info.epoch) return std::nullopt;
  if (found->second.info().epoch > info.epoch) return LifeState::dead;
  return found->second.life.state;
}

std::optional<Notice> MembershipProtocol::obituary(const WorkerInfo& info) const {
  if (fenced_) return Notice{Notice::Step::dead, self_.info, self_.info, fenced_->what()};
  const auto found = entries_.find(info.id);
  if (found == entries_.end()) return std::nullopt;
  const Entry& entry = found->second;
  const std::uint64_t epoch = entry.info().epoch;
  if (epoch < info.epoch || (epoch == info.epoch && entry.alive())) return std::nullopt;
  Notice dead{Notice::Step::dead, info, self_.info, entry.life.verdict};
  if (epoch > info.epoch) {
    dead.text = life_text(info) + " is over: it is now epoch " + std::to_string(epoch);
  } else if (entry.life.state == LifeState::left) {
    return Notice{Notice::Step::list, info, self_.info, {}, {entry.life}};
  }
  return dead;
}

// ---- connections: silence, digests, and the lives that this worker watches (R1)

namespace {

// Heartbeats in a row whose digests differ before a list is sent.
constexpr int kMismatches = 2;
// The pause after a list doubles so often: while many workers join, digests differ all the time.
constexpr int kDoublings = 4;

std::string milliseconds_text(std::chrono::steady_clock::duration duration) {
  return std::to_string(duration / std::chrono::milliseconds(1)) + " ms";
}

}  // namespace

// A life to which there has been no connection yet.
void MembershipProtocol::watch(Entry& entry, WorkerId decider, Time now, Effects& effects) {
  if (leaving_) return;
  const auto timeout = settings_.heartbeat_timeout;
  const bool decides = decider == self_.info.id;
  if (!entry.absent) {
    if (!decides && entry.info().id != decider) return end_absence(entry);
    if (!entry.awaited_since) entry.awaited_since = now;
    const bool late = now - std::max(*entry.awaited_since, awake_since_) >= timeout;
    if (!entry.reached_at) {
      if (decides && !late) return;
      entry.awaited_since = now;
    } else if (late) {
      entry.askers.insert(self_.info.id);
      entry.absent = true;
    }
  }
  if (entry.reached_at && now - *entry.reached_at < timeout) return;
  entry.reached_at = now;
  effects.reach.push_back(entry.info());
}

// It is there, or need not be.
void MembershipProtocol::end_absence(Entry& entry) {
  if (std::exchange(entry.absent, false)) entry.askers.erase(self_.info.id);
  entry.awaited_since.reset();
  entry.reached_at.reset();
}

void MembershipProtocol::on_tick(Time now, std::span<const Link> links, Effects& effects) {
  if (over()) return;
  // After a pause of this process, silence says nothing about the others.
  if (last_tick_ && now - *last_tick_ > settings_.heartbeat_timeout / 2) awake_since_ = now;
  last_tick_ = now;
  const WorkerId decider = judge();
  for (const Link& link : links) {
    Entry* entry = find(link.id);
    if (entry == nullptr || entry->info().epoch != link.epoch || !entry->within_reach()) continue;
    entry->unconnected = !link.bound;
    if (!link.bound) {
      watch(*entry, decider, now, effects);
      continue;
    }
    end_doubt(*entry);
    entry->heard = std::max({entry->heard, link.heard, awake_since_});
    if (now - entry->heard >= settings_.heartbeat_timeout) {
      lose(
          *entry,
          Error(ErrorCode::disconnected, life_text(entry->info()) + " has been silent for " +
                                             milliseconds_text(now - entry->heard) +
                                             "; raise STITCH_HEARTBEAT_TIMEOUT if it was only slow")
              .with_worker(entry->info().name),
          effects);
      after_loss(entry->info(), now, effects);
    }
  }
  for (auto& [id, entry] : entries_) {
    // What fails on this side must not cost a judge that comes first its turn.
    ask_witnesses(entry, now, effects);
    const auto timeout = settings_.heartbeat_timeout;
    const Time next =
        entry.undecided ? entry.asked_at + heartbeat_interval(settings_.heartbeat_timeout)
        : entry.doubted ? entry.probed_at + timeout
                        : entry.asked_at + (entry.answers_since ? kGivesUp : kAskAgain) * timeout;
    const bool due = now >= next;
    if (entry.suspected() && (entry.asked || due || entry.asked_at == Time{}))
      pursue(entry, now, effects);
  }
  answer_joins(now, effects);
  if (leave_deadline_ && now >= *leave_deadline_) leave_pending_.clear();
  finish_leave(effects);
}

void MembershipProtocol::on_heartbeat(const WorkerInfo& from, const Digests& digests, Time now,
                                      Effects& effects) {
  Entry* entry = find(from);
  if (over() || entry == nullptr || !entry->within_reach()) return;
  const auto pause =
      heartbeat_interval(settings_.heartbeat_timeout) * (1 << std::min(entry->lists, kDoublings));
  if (digests == digests_) {
    entry->mismatches = 0;
    entry->lists = 0;
  } else if (++entry->mismatches >= kMismatches && now >= entry->listed_at + pause) {
    entry->mismatches = 0;
    entry->listed_at = now;
    ++entry->lists;
    Notice list{Notice::Step::list, self_.info, self_.info, {}, {}};
    list.lives = lives();
    std::erase_if(list.lives, [&](const KnownLife& life) {
      const std::size_t at = life.card.info.id.value() % kDigests;
      return digests[at] == digests_[at];
    });
    effects.send.emplace_back(from, std::move(list));
  }
}

// ---- what is heard of lives; joining (R5) and leaving (R6)

// Takes in what another member knows of one life, if it is news that may be told on.
void MembershipProtocol::add(const KnownLife& life, const WorkerInfo& by, Time now,
                             Effects& effects) {
  if (!may_keep(life)) return;
  const WorkerInfo& info = life.card.info;
  if (info.id == self_.info.id) {
    // A later life of this worker: this one is over.
    if (info.epoch > self_.info.epoch) {
      fence("it is now epoch " + std::to_string(info.epoch), effects);
    } else if (info.epoch == self_.info.epoch && life.state == LifeState::dead) {
      fence(life.verdict, effects);
    }
    return;
  }
  Entry* entry = find(info.id);
  if (entry != nullptr && entry->info().epoch > info.epoch) return;
  if (entry != nullptr && entry->info().epoch == info.epoch) {
    if (life.state == LifeState::dead) declare(*entry, by, life.verdict, now, effects);
    if (life.state == LifeState::left) mark_left(*entry, now, effects);
    return;
  }
  if (entry != nullptr) {
    declare(*entry, by,
            life_text(entry->info()) + " is over: it is now epoch " + std::to_string(info.epoch),
            now, effects);
    erase(*entry);
  }
  Event news{life.state == LifeState::alive  ? Event::Kind::joined
             : life.state == LifeState::left ? Event::Kind::left
                                             : Event::Kind::dead,
             life.card,
             {}};
  if (life.state == LifeState::dead)
    news.reason = Error(ErrorCode::disconnected, life.verdict).with_worker(info.name);
  insert(life);
  effects.events.push_back(std::move(news));
}

void MembershipProtocol::merge(std::span<const KnownLife> lives, const WorkerInfo& by, Time now,
                               Effects& effects) {
  for (const KnownLife& life : lives) {
    if (over()) return;
    add(life, by, now, effects);
  }
}

std::optional<Error> MembershipProtocol::refusal(const MemberCard& card) const {
  const WorkerInfo& info = card.info;
  const auto taken = [&](const std::string& by) {
    return Error(ErrorCode::already_exists, to_string(info) + " cannot join: " + by);
  };
  if (info.id == self_.info.id || info.name == self_.info.name)
    return taken("it is " + to_string(self_.info) + ", which is alive");
  for (const auto& [id, entry] : entries_) {
    const WorkerInfo& known = entry.info();
    if ((id == info.id) != (known.name == info.name))
      return taken("there is " + to_string(known) + " already");
    if (id == info.id && known.epoch >= info.epoch)
      return taken("there is epoch " + std::to_string(known.epoch) + " already");
  }
  if (!may_keep({card})) {
    return Error(ErrorCode::overloaded, to_string(info) +
                                            " cannot join: what the members say of themselves "
                                            "fills the world");
  }
  if (!settings_.admit) return std::nullopt;
  std::vector<MemberCard> live = live_cards();
  std::erase_if(live, [&](const MemberCard& each) { return each.info.id == info.id; });
  return settings_.admit(card, live);
}

// Whether several members live and none of them, `besides` left out, can be told anything: a worker
// that joined here would be unknown to all of them.
bool MembershipProtocol::isolated(WorkerId besides) const {
  int out_of_reach = 0;
  for (const auto& [id, entry] : entries_) {
    if (id == besides || !entry.alive()) continue;
    if (entry.within_reach()) return false;
    ++out_of_reach;
  }
  return out_of_reach > 1;
}

void MembershipProtocol::admit(std::uint64_t ticket, const MemberCard& card, Time now,
                               Effects& effects) {
  if (fenced_ || leaving_ || isolated(card.info.id)) {
    effects.answers.push_back({ticket, card.info, {}, true});
    return;
  }
  if (auto why = refusal(card)) {
    effects.answers.push_back({ticket, card.info, std::move(why)});
    return;
  }
  Joining& joining = joining_[ticket] = {ticket, card};
  Entry* former = find(card.info.id);
  if (former != nullptr && former->alive() && former->info().epoch < card.info.epoch) {
    // Two workers of one name, or one that came back before its death was noticed.
    if (!former->probing) begin_probe(*former, now, effects);
    return;
  }
  announce(joining, now, effects);
  answer_joins(now, effects);
}

void MembershipProtocol::announce(Joining& joining, Time now, Effects& effects) {
  joining.deadline = now + kAskAgain * settings_.heartbeat_timeout;
  add({joining.card}, self_.info, now, effects);
  const Notice notice{Notice::Step::member, joining.card.info, self_.info, {}, {{joining.card}}};
  for (const auto& [id, entry] : entries_) {
    if (id == joining.card.info.id || !entry.within_reach()) continue;
    joining.pending.insert(id);
    effects.send.emplace_back(entry.info(), notice);
  }
  joining.announced = true;
}

void MembershipProtocol::answer_joins(Time now, Effects& effects) {
  for (auto each = joining_.begin(); each != joining_.end();) {
    Joining& joining = each->second;
    const Entry* const former = joining.announced ? nullptr : find(joining.card.info.id);
    if (!joining.announced && (former == nullptr || !former->alive() ||
                               former->info().epoch >= joining.card.info.epoch)) {
      // What was being probed is over by another's word.
      if (auto why = refusal(joining.card)) {
        effects.answers.push_back({joining.ticket, joining.card.info, std::move(why)});
        each = joining_.erase(each);
        continue;
      }
      announce(joining, now, effects);
    }
    if (!joining.announced || (!joining.pending.empty() && now < joining.deadline)) {
      ++each;
      continue;
    }
    effects.answers.push_back({joining.ticket, joining.card.info});
    each = joining_.erase(each);
  }
}

void MembershipProtocol::acknowledged(WorkerId by, const WorkerInfo& about) {
  for (auto& [ticket, joining] : joining_) {
    if (joining.card.info == about) joining.pending.erase(by);
  }
}

void MembershipProtocol::finish_leave(Effects& effects) {
  if (!leave_deadline_ || !leave_pending_.empty()) return;
  leave_deadline_.reset();
  effects.leave_done = true;
}

void MembershipProtocol::leave(Time now, Effects& effects) {
  leaving_ = true;
  const Notice notice{Notice::Step::left, self_.info, self_.info};
  for (const auto& [id, entry] : entries_) {
    if (!entry.within_reach()) continue;
    leave_pending_.insert(id);
    effects.send.emplace_back(entry.info(), notice);
  }
  if (over() || leave_pending_.empty()) {
    effects.leave_done = true;
  } else {
    leave_deadline_ = now + settings_.heartbeat_timeout;
  }
}

}  // namespace stitch::rpc
