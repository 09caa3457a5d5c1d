// What a MembershipProtocol knows of the lives of its world.
#include <algorithm>
#include <utility>

#include "stitch/base/hash.h"
#include "stitch/rpc/membership/membership_protocol.h"
#include "stitch/rpc/message/life_text.h"

namespace stitch::rpc {

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
  if (inserted) digest_ += summand(life.card.info, !at->second.alive());
}

void MembershipProtocol::erase(const Entry& entry) {
  digest_ -= summand(entry.info(), !entry.alive());
  const WorkerId id = entry.info().id;
  entries_.erase(id);
}

void MembershipProtocol::end_life(Entry& entry, LifeState state) {
  digest_ -= summand(entry.info(), !entry.alive());
  entry.life.state = state;
  digest_ += summand(entry.info(), !entry.alive());
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
  // A process that comes back with an epoch that is used up learns from it which one is not.
  if (entry.info().name == info.name) dead.lives.push_back(in_brief(entry.life));
  if (epoch > info.epoch) {
    dead.text = life_text(info) + " is over: it is now epoch " + std::to_string(epoch);
  } else if (entry.life.state == LifeState::left) {
    return Notice{Notice::Step::left, info};
  }
  return dead;
}

}  // namespace stitch::rpc
