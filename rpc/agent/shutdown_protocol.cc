#include "stitch/rpc/agent/shutdown_protocol.h"

#include <algorithm>
#include <utility>

#include "stitch/base/name_list.h"

namespace stitch::rpc {

namespace {
// Without an answer, a message that may be lost is repeated after this time.
constexpr std::chrono::seconds kRepeatInterval{1};
// A leader repeats sooner at first.
constexpr std::chrono::milliseconds kFirstInterval{100};
// Between two rounds.
constexpr std::chrono::microseconds kFirstPause{200};
constexpr std::chrono::microseconds kLongestPause{20'000};
// What is waited for, in reports.
constexpr const char* kForGo = "the leader of the shutdown";
constexpr const char* kForShutdown = "shutdown to be called";
constexpr const char* kForStatus = "an answer about what is in flight";
constexpr const char* kForCalls = "calls to end";
constexpr const char* kForGone = "its leave";
}  // namespace

ShutdownProtocol::ShutdownProtocol(WorkerInfo self, std::function<WorkerInfo(WorkerId)> worker)
    : self_(std::move(self)), worker_(std::move(worker)) {}

void ShutdownProtocol::begin(Time wait, Clock::duration limit) {
  wait_ = wait;
  limit_ = limit;
  phase_ = Phase::choosing;
}

// ---- messages

bool ShutdownProtocol::is_over(const WorkerInfo& life) const {
  const auto lost = lost_.find(life.id);
  return lost != lost_.end() && life.epoch <= lost->second;
}

void ShutdownProtocol::check_leads(const WorkerInfo& from, const char* what) const {
  if (ready_sent_.contains(from.id)) return;
  throw Error(ErrorCode::protocol, std::string("shutdown message: \"") + what + "\" from " +
                                       to_string(from) + ", which does not lead the shutdown of " +
                                       to_string(self_));
}

ShutdownProtocol::Effects ShutdownProtocol::on_message(const WorkerInfo& from,
                                                       const Message& message) {
  Effects effects;
  if (is_over(from)) return effects;
  switch (message.step) {
    case Step::ready:
      ready_.insert(from.id);
      return effects;
    case Step::poll:
      check_leads(from, "poll");
      if (leader_ != from.id) return effects;
      polled_ = true;
      effects.sends.push_back({from.id, {Step::status, message.round}});
      return effects;
    case Step::status:
      if (message.round == 0 || message.round > round_) {
        throw Error(ErrorCode::protocol,
                    "shutdown message: a status of round " + std::to_string(message.round) +
                        " when the last round asked for was " + std::to_string(round_));
      }
      if (message.round == round_) statuses_.insert_or_assign(from.id, message.status);
      return effects;
    case Step::go:
      check_leads(from, "go");
      effects.expect_closing = true;
      effects.sends.push_back({from.id, {Step::gone, message.round}});
      effects.may_close = true;
      return effects;
    case Step::gone:
      if (!go_sent_)
        throw Error(ErrorCode::protocol, "shutdown message: \"gone\" before \"go\" was sent");
      gone_.insert(from.id);
      return effects;
  }
  throw Error(
      ErrorCode::protocol,
      "shutdown message: step " + std::to_string(static_cast<int>(message.step)) + " is unknown");
}

void ShutdownProtocol::on_peer_lost(const WorkerInfo& peer) {
  const auto [lost, first] = lost_.try_emplace(peer.id, peer.epoch);
  if (!first && peer.epoch <= lost->second) return;
  lost->second = peer.epoch;
  ready_.erase(peer.id);
  statuses_.erase(peer.id);
  ready_sent_.erase(peer.id);
  others_.erase(peer.id);
  missing_.erase(peer.id);
  ++changes_;
}

void ShutdownProtocol::on_peer_joined() {
  ++changes_;
  if (phase_ == Phase::closing || phase_ == Phase::ended || answered_) return;
  ends_by_.reset();  // it has not called shutdown yet
  polled_ = false;
}

// ---- time

ShutdownProtocol::Effects ShutdownProtocol::on_time(Time now, const View& view) {
  Effects effects;
  switch (phase_) {
    case Phase::not_begun:
    case Phase::ended:
      break;
    case Phase::choosing:
      choose(now, view, effects);
      break;
    case Phase::following:
      if (!answered_ && changes_ != chosen_at_) {
        choose(now, view, effects);
      } else {
        follow(now, effects);
      }
      break;
    default:
      lead(now, view, effects);
  }
  return effects;
}

void ShutdownProtocol::choose(Time now, const View& view, Effects& effects) {
  chosen_at_ = view.changes;
  const WorkerId leader = *view.live.begin();
  if (leader != self_.id) {
    leader_ = leader;
    ready_sent_.insert(leader);
    phase_ = Phase::following;
    repeat_at_ = now;
    return follow(now, effects);
  }
  leader_.reset();
  pause_ = kFirstPause;
  gather(now);
  lead(now, view, effects);
}

void ShutdownProtocol::follow(Time now, Effects& effects) {
  if (polled_) all_are_ready(now);
  if (answered_) return end(std::nullopt);
  if (now >= repeat_at_) {
    effects.sends.push_back({*leader_, {Step::ready}});
    repeat_at_ = now + kRepeatInterval;
  }
  if (changes_ != chosen_at_) {
    next_ = now;
    return;
  }
  now_waiting(now, kForGo, {*leader_});
  if (now >= deadline()) return end(timed_out("no GO within the time limit from", {*leader_}));
  next_ = std::min(deadline(), repeat_at_);
}

void ShutdownProtocol::lead(Time now, const View& view, Effects& effects) {
  if (phase_ == Phase::closing) {
    std::erase_if(others_, [&](WorkerId id) { return !view.live.contains(id); });
  } else {
    // A worker with a lower id has come back: it leads.
    if (*view.live.begin() < self_.id) return choose(now, view, effects);
    looked_at_ = view.changes;
    others_ = view.live;
    others_.erase(self_.id);
    // Another one has come back, or joined.
    if (phase_ != Phase::gathering &&
        !std::includes(ready_.begin(), ready_.end(), others_.begin(), others_.end()))
      gather(now);
  }
  if (phase_ == Phase::gathering) {
    // A worker without a connection to this one may be gone unnoticed: connecting will tell.
    if (all(
            now, kForShutdown, [this](WorkerId id) { return ready_.contains(id); },
            [&effects](WorkerId id) { effects.reach.push_back(id); })) {
      all_are_ready(now);
      begin_round(now, effects);
    } else if (now >= deadline()) {
      return end(timed_out("no shutdown was called within the time limit on", missing_));
    }
  } else if (phase_ == Phase::pausing) {
    if (now >= deadline()) {
      return end(busy_.empty() ? not_graceful("messages are still in flight")
                               : timed_out("calls are still running on", busy_));
    }
    if (now >= pause_until_) begin_round(now, effects);
  }
  if (phase_ == Phase::polling) {
    const auto poll = [&](WorkerId id) { effects.sends.push_back({id, {Step::poll, round_}}); };
    const auto answered = [this](WorkerId id) { return statuses_.contains(id); };
    if (all(now, kForStatus, answered, poll)) {
      effects.sample = true;
    } else if (now >= deadline()) {
      end(timed_out("no answer within the time limit from", missing_));
    }
  } else if (phase_ == Phase::closing) {
    // A worker that has closed after its answer is lost, and not waited for.
    const auto go = [&](WorkerId id) { effects.sends.push_back({id, {Step::go}}); };
    const auto gone = [this](WorkerId id) { return gone_.contains(id); };
    if (all(now, kForGone, gone, go) || now >= deadline()) end(std::nullopt);
  }
}

void ShutdownProtocol::gather(Time now) {
  phase_ = Phase::gathering;
  previous_.clear();
  start_waiting(now);
}

void ShutdownProtocol::all_are_ready(Time now) {
  if (!ends_by_) ends_by_ = Time::max() - now > limit_ ? now + limit_ : Time::max();
}

void ShutdownProtocol::begin_round(Time now, Effects& effects) {
  ++round_;
  statuses_.clear();
  phase_ = Phase::polling;
  send_to_all(Step::poll, round_, effects);
  start_waiting(now);
}

ShutdownProtocol::Effects ShutdownProtocol::on_sample(Time now, const Status& own) {
  Effects effects;
  if (phase_ != Phase::polling) return effects;
  auto statuses = statuses_;
  statuses.insert_or_assign(self_.id, own);
  busy_.clear();
  Status sum;
  bool lost = false;
  for (const auto& [id, status] : statuses) {
    if (status.busy != 0) busy_.insert(id);
    sum.sent += status.sent;
    sum.received += status.received;
    lost = lost || status.lost != 0;
  }
  // Messages on a lost connection are in the sums of one side only, and to the leader both sides
  // may be live: once a worker has lost a peer, equal rounds have to suffice.
  const bool balanced = sum.sent == sum.received || lost;
  // A worker that has joined since the last look is not among those that were asked.
  const bool all_asked = changes_ == looked_at_;
  if (busy_.empty() && balanced && all_asked && statuses == previous_) {
    send_to_all(Step::go, 0, effects);  // first: without memory, the round is looked at again
    phase_ = Phase::closing;
    effects.expect_closing = true;
    go_sent_ = true;
    start_waiting(now);
    next_ = now;
    return effects;
  }
  previous_ = busy_.empty() ? std::move(statuses) : std::map<WorkerId, Status>{};
  if (busy_.empty()) waiting_.reset();  // messages are in flight: no worker is waited for
  now_waiting(now, kForCalls, busy_);
  phase_ = Phase::pausing;
  pause_until_ = now + pause_;
  pause_ = std::min<Clock::duration>(pause_ * 2, kLongestPause);
  next_ = std::min(deadline(), pause_until_);
  return effects;
}

void ShutdownProtocol::start_waiting(Time now) {
  missing_.clear();
  interval_ = kFirstInterval;
  repeat_at_ = now + interval_;
}

bool ShutdownProtocol::all(Time now, const char* what,
                           const std::function<bool(WorkerId)>& has_arrived,
                           const std::function<void(WorkerId)>& repeat) {
  if (!missing_.empty() && now >= repeat_at_) {
    std::for_each(missing_.begin(), missing_.end(), repeat);
    interval_ = std::min<Clock::duration>(interval_ * 2, kRepeatInterval);
    repeat_at_ = now + interval_;
  }
  missing_.clear();
  for (const WorkerId id : others_) {
    if (!has_arrived(id)) missing_.insert(id);
  }
  now_waiting(now, what, missing_);
  next_ = std::min(deadline(), repeat_at_);
  return missing_.empty();
}

void ShutdownProtocol::send_to_all(Step step, std::uint64_t round, Effects& effects) const {
  for (const WorkerId id : others_) effects.sends.push_back({id, {step, round}});
}

// ---- what is said about it

void ShutdownProtocol::now_waiting(Time now, const char* what, std::set<WorkerId> missing) {
  if (missing.empty()) return;
  if (waiting_ && waiting_->what == what && waiting_->missing == missing) return;
  // Between two rounds about calls that do not end, the answers take no time to speak of.
  if (waiting_ && waiting_->what == kForCalls && what == kForStatus) return;
  waiting_ = AwaitedWorkers{what, std::move(missing), now};
}

std::optional<std::string> ShutdownProtocol::waits_for_others() const {
  if (ends_by_ || !waiting_ || waiting_->missing.empty()) return std::nullopt;
  std::vector<std::string> names;
  for (const WorkerId id : waiting_->missing) names.push_back("worker \"" + worker_(id).name + '"');
  const bool several = names.size() > 1;
  std::string text = "worker \"" + self_.name + "\" waits in shutdown for " +
                     base::join_names(names) + ", which " + (several ? "are" : "is") +
                     " alive and " + (several ? "have" : "has");
  return text + (waiting_->what == kForGo ? " not said that all have called shutdown"
                                          : " not called shutdown");
}

void ShutdownProtocol::end(std::optional<Error> error) {
  phase_ = Phase::ended;
  if (error) waited_ = std::move(waiting_);
  waiting_.reset();
  error_ = std::move(error);
}

Error ShutdownProtocol::not_graceful(const std::string& why) const {
  return Error(ErrorCode::timeout, "shutdown of " + to_string(self_) + " was not graceful: " + why);
}

Error ShutdownProtocol::timed_out(const std::string& what,
                                  const std::set<WorkerId>& missing) const {
  std::vector<std::string> names;
  for (const auto id : missing) names.push_back(to_string(worker_(id)));
  return not_graceful(what + " " + base::join_names(names));
}

}  // namespace stitch::rpc
