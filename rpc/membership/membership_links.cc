// What a MembershipProtocol makes of its connections: silence, digests, and whom it watches
// (R1).
#include <algorithm>
#include <utility>

#include "stitch/rpc/membership/membership_protocol.h"
#include "stitch/rpc/message/life_text.h"

namespace stitch::rpc {

namespace {

// Heartbeats in a row whose digest differs before a list is sent.
constexpr int kMismatches = 2;

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
      if (decides && !late) return;  // it connects by itself
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

void MembershipProtocol::on_heartbeat(const WorkerInfo& from, std::uint64_t digest, Time now,
                                      Effects& effects) {
  Entry* entry = find(from);
  if (over() || entry == nullptr || !entry->within_reach()) return;
  if (digest == this->digest()) {
    entry->mismatches = 0;
  } else if (++entry->mismatches >= kMismatches &&
             now >= entry->listed_at + heartbeat_interval(settings_.heartbeat_timeout)) {
    entry->mismatches = 0;
    entry->listed_at = now;
    Notice list{Notice::Step::list, self_.info, self_.info, {}, {}};
    list.lives = lives();
    effects.send.emplace_back(from, std::move(list));
  }
}

}  // namespace stitch::rpc
