// How a MembershipProtocol takes in what it hears of lives; joining (R5) and leaving (R6).
#include <algorithm>
#include <utility>

#include "stitch/rpc/membership/membership_protocol.h"
#include "stitch/rpc/message/life_text.h"

namespace stitch::rpc {

// Takes in what another member knows of one life, if it is news.
void MembershipProtocol::add(const KnownLife& life, const WorkerInfo& by, Time now,
                             Effects& effects) {
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

std::optional<Notice> MembershipProtocol::refusal(const MemberCard& card) const {
  const WorkerInfo& info = card.info;
  const auto refused = [&](const std::string& why) {
    return Notice{Notice::Step::refusal, info, self_.info,
                  to_string(info) + " cannot join: " + why};
  };
  const auto taken = [&](const std::string& by) {
    return Notice{
        Notice::Step::refusal, info, self_.info,
        to_refusal_text(Error(ErrorCode::already_exists, to_string(info) + " cannot join: " + by))};
  };
  if (info.id == self_.info.id || info.name == self_.info.name)
    return taken("it is " + to_string(self_.info) + ", which is alive");
  for (const auto& [id, entry] : entries_) {
    const WorkerInfo& known = entry.info();
    if ((id == info.id) != (known.name == info.name))
      return taken("there is " + to_string(known) + " already");
    if (id != info.id) continue;
    // Of equal epochs, the card tells a process that asks again from another one.
    const bool asks_again = entry.alive() && entry.life.card == card;
    if (known.epoch < info.epoch || (known.epoch == info.epoch && asks_again)) continue;
    auto notice =
        refused("its epoch " + std::to_string(info.epoch) +
                (known.epoch == info.epoch && entry.alive()
                     ? " is that of another process"
                     : " is over; it was epoch " + std::to_string(known.epoch) + " last"));
    notice.lives.push_back(in_brief(entry.life));
    return notice;
  }
  if (!settings_.admit) return std::nullopt;
  std::vector<MemberCard> live = live_cards();
  std::erase_if(live, [&](const MemberCard& each) { return each.info.id == info.id; });
  const auto why = settings_.admit(card, live);
  if (!why) return std::nullopt;
  return Notice{Notice::Step::refusal, info, self_.info, to_refusal_text(*why)};
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

Notice MembershipProtocol::ask_another(const WorkerInfo& joiner, const std::string& why) const {
  Notice notice{Notice::Step::refusal, joiner, self_.info, why, {}};
  notice.lives.push_back({self_, LifeState::left, {}});
  return notice;
}

void MembershipProtocol::on_join(std::uint64_t ticket, const MemberCard& card, Time now,
                                 Effects& effects) {
  if (fenced_ || leaving_ || isolated(card.info.id)) {
    const std::string self = to_string(self_.info);
    effects.answers.push_back(
        {ticket, ask_another(card.info, fenced_    ? std::string(fenced_->what())
                                        : leaving_ ? self + " is leaving"
                                                   : self + " has lost all other members")});
    return;
  }
  if (auto notice = refusal(card)) {
    effects.answers.push_back({ticket, std::move(*notice)});
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
      if (auto notice = refusal(joining.card)) {
        effects.answers.push_back({joining.ticket, std::move(*notice)});
        each = joining_.erase(each);
        continue;
      }
      announce(joining, now, effects);
    }
    if (!joining.announced || (!joining.pending.empty() && now < joining.deadline)) {
      ++each;
      continue;
    }
    Notice welcome{Notice::Step::welcome, joining.card.info, self_.info, {}, {}};
    welcome.lives = lives();
    effects.answers.push_back({joining.ticket, std::move(welcome)});
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

void MembershipProtocol::on_welcome(const Notice& welcome, Time now, Effects& effects) {
  if (!over()) merge(welcome.lives, welcome.by, now, effects);
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
