#include "stitch/rpc/agent/graceful_shutdown.h"

#include <algorithm>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/name_list.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/message/frame_kinds.h"

namespace stitch::rpc {

using std::chrono::steady_clock;

namespace {
// Without an answer, a message that may be lost is repeated after this time.
constexpr std::chrono::seconds kRepeatInterval{1};
// What is waited for, in reports.
constexpr const char* kForGo = "the leader of the shutdown";
constexpr const char* kForShutdown = "shutdown to be called";
constexpr const char* kForStatus = "an answer about what is in flight";
constexpr const char* kForCalls = "calls to end";
constexpr const char* kForGone = "its leave";
}  // namespace

std::set<WorkerId> GracefulShutdown::live() const {
  std::set<WorkerId> ids;
  for (const auto& info : agent_.peers().infos()) {
    if (info.id == agent_.self().id || !agent_.peers().lost(info.id)) ids.insert(info.id);
  }
  return ids;
}

void GracefulShutdown::send(WorkerId to, Step step, std::uint64_t round, Status status) {
  OutMessage message(wire::kLeave);
  base::ByteWriter out(message.frame.body());
  out.write(step);
  out.write(round);
  out.write(status.busy);
  out.write(status.sent);
  out.write(status.received);
  out.write(status.lost);
  try {
    agent_.send_control(agent_.peers().find(to), std::move(message));
  } catch (const Error&) {
    // The peer is lost, or the message will be repeated: continue with the others.
  }
}

GracefulShutdown::Status GracefulShutdown::own_status() const {
  const auto activity = agent_.activity();
  return {activity.busy, activity.sent, activity.received, agent_.peers().lost_lives()};
}

bool GracefulShutdown::follows(WorkerId from, const char* what) {
  base::MutexLock lock(mutex_);
  if (leader_ == from) return true;
  if (ready_sent_.contains(from)) return false;
  throw Error(ErrorCode::protocol, std::string("shutdown message: \"") + what + "\" from " +
                                       to_string(agent_.peers().find(from)) +
                                       ", which does not lead the shutdown of " +
                                       to_string(agent_.self()));
}

void GracefulShutdown::on_message(InMessage message) {
  base::ByteReader in(message.view.body(), "shutdown message");
  const auto step = in.read<Step>();
  const auto round = in.read<std::uint64_t>();
  const Status status{in.read<std::uint64_t>(), in.read<std::uint64_t>(), in.read<std::uint64_t>(),
                      in.read<std::uint64_t>()};
  in.expect_end();
  const WorkerId from = message.from.id;
  switch (step) {
    case Step::ready: {
      base::MutexLock lock(mutex_);
      ready_.insert(from);
      changed_.notify_all();
      return;
    }
    case Step::poll:
      if (follows(from, "poll")) send(from, Step::status, round, own_status());
      return;
    case Step::status: {
      base::MutexLock lock(mutex_);
      if (round == 0 || round > round_) {
        throw Error(ErrorCode::protocol,
                    "shutdown message: a status of round " + std::to_string(round) +
                        " when the last round asked for was " + std::to_string(round_));
      }
      if (round == round_) statuses_.insert_or_assign(from, status);
      changed_.notify_all();
      return;
    }
    case Step::go: {
      if (!follows(from, "go")) return;
      agent_.peers().expect_closing();
      send(from, Step::gone, round, {});
      base::MutexLock lock(mutex_);
      go_received_ = true;
      changed_.notify_all();
      return;
    }
    case Step::gone: {
      base::MutexLock lock(mutex_);
      if (!go_sent_)
        throw Error(ErrorCode::protocol, "shutdown message: \"gone\" before \"go\" was sent");
      gone_.insert(from);
      changed_.notify_all();
      return;
    }
  }
  throw Error(ErrorCode::protocol,
              "shutdown message: step " + std::to_string(static_cast<int>(step)) + " is unknown");
}

void GracefulShutdown::on_peer_lost(const WorkerInfo& peer) {
  base::MutexLock lock(mutex_);
  ready_.erase(peer.id);
  statuses_.erase(peer.id);
  ++losses_;
  changed_.notify_all();
}

Error GracefulShutdown::timed_out(const std::string& what,
                                  const std::set<WorkerId>& missing) const {
  std::vector<std::string> names;
  for (const auto id : missing) names.push_back(to_string(agent_.peers().find(id)));
  return Error(ErrorCode::timeout, "shutdown of " + to_string(agent_.self()) +
                                       " was not graceful: " + what + " " +
                                       base::join_names(names));
}

std::optional<GracefulShutdown::Waiting> GracefulShutdown::waiting() const {
  base::MutexLock lock(mutex_);
  return waiting_;
}

void GracefulShutdown::now_waiting(const char* what, std::set<WorkerId> missing) {
  if (missing.empty()) return;
  if (waiting_ && waiting_->what == what && waiting_->missing == missing) return;
  // Between two rounds about calls that do not end, the answers take no time to speak of.
  if (waiting_ && waiting_->what == kForCalls && what == kForStatus) return;
  waiting_ = Waiting{what, std::move(missing), steady_clock::now()};
}

std::optional<Error> GracefulShutdown::run(steady_clock::time_point deadline) {
  for (;;) {
    // Read first: a loss that is noticed while READY is being sent must count.
    std::uint64_t losses = 0;
    {
      base::MutexLock lock(mutex_);
      losses = losses_;
    }
    auto others = live();
    const WorkerId leader = *others.begin();
    const bool leads = leader == agent_.self().id;
    {
      base::MutexLock lock(mutex_);
      leader_ = leads ? std::nullopt : std::optional(leader);
      if (!leads) ready_sent_.insert(leader);
    }
    if (leads) {
      others.erase(leader);
      return lead(deadline, others);
    }
    send(leader, Step::ready, 0, {});
    auto repeat_at = steady_clock::now() + kRepeatInterval;
    base::MutexLock lock(mutex_);
    while (!go_received_ && losses_ == losses && steady_clock::now() < deadline) {
      now_waiting(kForGo, {leader});
      changed_.wait_until(mutex_, std::min(deadline, repeat_at));
      if (go_received_ || losses_ != losses || steady_clock::now() < repeat_at) continue;
      lock.unlock();
      send(leader, Step::ready, 0, {});
      repeat_at = steady_clock::now() + kRepeatInterval;
      lock.lock();
    }
    if (go_received_) return std::nullopt;
    if (losses_ == losses) {
      lock.unlock();
      return timed_out("no GO within the time limit from", {leader});
    }
  }
}

std::optional<Error> GracefulShutdown::lead(steady_clock::time_point deadline,
                                            const std::set<WorkerId>& initial) {
  const auto still_live = [&] {
    std::set<WorkerId> others;
    const auto now_live = live();
    std::set_intersection(initial.begin(), initial.end(), now_live.begin(), now_live.end(),
                          std::inserter(others, others.begin()));
    return others;
  };
  // Waits until every worker still live has `arrived`; returns those missing at the deadline.
  // Meanwhile the message to the missing ones is repeated.
  // A worker with a lower id has come back: it leads.
  const auto outranked = [this] { return *live().begin() < agent_.self().id; };
  const auto wait_for = [&](const char* what, auto&& arrived, auto&& repeat) {
    constexpr std::chrono::milliseconds kFirstInterval{100};
    std::set<WorkerId> missing;
    std::chrono::milliseconds interval = kFirstInterval;
    auto repeat_at = steady_clock::now() + interval;
    for (;;) {
      if (what == kForShutdown && outranked()) return std::set<WorkerId>{};
      const auto others = still_live();
      if (!missing.empty() && steady_clock::now() >= repeat_at) {
        for (const auto id : missing) repeat(id);
        interval = std::min<std::chrono::milliseconds>(interval * 2, kRepeatInterval);
        repeat_at = steady_clock::now() + interval;
      }
      base::MutexLock lock(mutex_);
      missing.clear();
      for (const auto id : others) {
        if (!arrived(id)) missing.insert(id);
      }
      now_waiting(what, missing);
      if (missing.empty()) return missing;
      // A loss between still_live() and here costs only this short wait.
      const auto until = std::min(deadline, steady_clock::now() + kFirstInterval);
      changed_.wait_until(mutex_, until);
      if (steady_clock::now() >= deadline) return missing;
    }
  };
  // A worker without a connection to this one may be gone unnoticed: connecting will tell.
  auto missing = wait_for(
      kForShutdown,
      [this](WorkerId id) STITCH_NO_THREAD_SAFETY_ANALYSIS { return ready_.contains(id); },
      [this](WorkerId id) { agent_.peers().reach(id); });
  if (!missing.empty())
    return timed_out("no shutdown was called within the time limit on", missing);
  if (outranked()) return run(deadline);

  std::map<WorkerId, Status> previous;
  auto interval = std::chrono::microseconds(200);
  for (std::uint64_t round = 1;; ++round) {
    const auto others = still_live();
    {
      base::MutexLock lock(mutex_);
      round_ = round;
      statuses_.clear();
    }
    const auto poll = [this, round](WorkerId id) { send(id, Step::poll, round, {}); };
    std::for_each(others.begin(), others.end(), poll);
    missing = wait_for(
        kForStatus,
        [this](WorkerId id) STITCH_NO_THREAD_SAFETY_ANALYSIS { return statuses_.contains(id); },
        poll);
    if (!missing.empty()) return timed_out("no answer within the time limit from", missing);
    std::map<WorkerId, Status> statuses;
    {
      base::MutexLock lock(mutex_);
      statuses = statuses_;
    }
    statuses.insert_or_assign(agent_.self().id, own_status());
    std::set<WorkerId> busy;
    Status sum;
    for (const auto& [id, status] : statuses) {
      if (status.busy != 0) busy.insert(id);
      sum.sent += status.sent;
      sum.received += status.received;
      sum.lost += std::min<std::uint64_t>(status.lost, agent_.world_size());
    }
    // Messages on a lost connection are in the sums of one side only, and to the leader both sides
    // may be live: once a worker has lost a peer, equal rounds have to suffice.
    const bool balanced = sum.sent == sum.received || sum.lost > 0;
    if (busy.empty() && balanced && statuses == previous) break;
    previous = busy.empty() ? std::move(statuses) : std::map<WorkerId, Status>{};
    base::MutexLock lock(mutex_);
    if (!busy.empty()) now_waiting(kForCalls, busy);
    changed_.wait_until(mutex_, std::min(deadline, steady_clock::now() + interval));
    if (steady_clock::now() >= deadline) {
      lock.unlock();
      return busy.empty()
                 ? Error(ErrorCode::timeout, "shutdown of " + to_string(agent_.self()) +
                                                 " was not graceful: messages are still in flight")
                 : timed_out("calls are still running on", busy);
    }
    interval = std::min(interval * 2, std::chrono::microseconds(20'000));
  }
  agent_.peers().expect_closing();
  {
    base::MutexLock lock(mutex_);
    go_sent_ = true;
  }
  const auto send_go = [this](WorkerId id) { send(id, Step::go, 0, {}); };
  const auto others = still_live();
  std::for_each(others.begin(), others.end(), send_go);
  // Close only when all have answered; a worker that has closed after its answer is lost, and not
  // waited for.
  wait_for(
      kForGone, [this](WorkerId id) STITCH_NO_THREAD_SAFETY_ANALYSIS { return gone_.contains(id); },
      send_go);
  return std::nullopt;
}

}  // namespace stitch::rpc
