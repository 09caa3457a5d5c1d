#include "stitch/rpc/agent/graceful_shutdown.h"

#include <algorithm>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/name_list.h"
#include "stitch/rpc/agent/agent.h"

namespace stitch::rpc {

using std::chrono::steady_clock;

namespace {
// How long nothing must come before what may have got lost is said again.
constexpr std::chrono::seconds kAgain{1};
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
    // It is lost, or will be spoken to again: no reason not to go on with the others.
  }
}

GracefulShutdown::Status GracefulShutdown::own_status() const {
  const auto activity = agent_.activity();
  return {activity.busy, activity.sent, activity.received, agent_.world_size() - live().size()};
}

bool GracefulShutdown::follows(WorkerId from, const char* what) {
  base::MutexLock lock(mutex_);
  if (leader_ == from) return true;
  if (told_.contains(from)) return false;
  throw Error(ErrorCode::protocol, std::string("leave message: \"") + what + "\" from " +
                                       to_string(agent_.peers().find(from)) +
                                       ", which does not lead the leaving of " +
                                       to_string(agent_.self()));
}

void GracefulShutdown::on_message(InMessage message) {
  base::ByteReader in(message.view.body(), "leave message");
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
                    "leave message: a status of round " + std::to_string(round) +
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
      go_ = true;
      changed_.notify_all();
      return;
    }
    case Step::gone: {
      base::MutexLock lock(mutex_);
      if (!released_)
        throw Error(ErrorCode::protocol, "leave message: \"gone\" before anybody was let go");
      gone_.insert(from);
      changed_.notify_all();
      return;
    }
  }
  throw Error(ErrorCode::protocol,
              "leave message: step " + std::to_string(static_cast<int>(step)) + " is unknown");
}

void GracefulShutdown::on_peer_lost() {
  base::MutexLock lock(mutex_);
  ++losses_;
  changed_.notify_all();
}

Error GracefulShutdown::late(const std::string& what, const std::set<WorkerId>& missing) const {
  std::vector<std::string> names;
  for (const auto id : missing) names.push_back(to_string(agent_.peers().find(id)));
  return Error(ErrorCode::timeout, "shutdown of " + to_string(agent_.self()) +
                                       " was not graceful: " + what + " " +
                                       base::join_names(names));
}

std::optional<Error> GracefulShutdown::run(steady_clock::time_point deadline) {
  for (;;) {
    // Before anything that may bring a loss: one that comes while READY is being sent must count.
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
      if (!leads) told_.insert(leader);
    }
    if (leads) {
      others.erase(leader);
      return lead(deadline, others);
    }
    send(leader, Step::ready, 0, {});
    auto again_at = steady_clock::now() + kAgain;
    base::MutexLock lock(mutex_);
    while (!go_ && losses_ == losses && steady_clock::now() < deadline) {
      changed_.wait_until(mutex_, std::min(deadline, again_at));
      if (go_ || losses_ != losses || steady_clock::now() < again_at) continue;
      lock.unlock();
      send(leader, Step::ready, 0, {});
      again_at = steady_clock::now() + kAgain;
      lock.lock();
    }
    if (go_) return std::nullopt;
    if (losses_ == losses) {
      lock.unlock();
      return late("no word to go within the time limit from", {leader});
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
  // Waits until everyone still live is in `arrived`; returns who is missing at the deadline. Those
  // that are late are spoken to again.
  const auto wait_for = [&](auto&& arrived, auto&& speak_again) {
    constexpr std::chrono::milliseconds kLate{100};
    std::set<WorkerId> missing;
    std::chrono::milliseconds pause = kLate;
    auto again_at = steady_clock::now() + pause;
    for (;;) {
      const auto others = still_live();
      if (!missing.empty() && steady_clock::now() >= again_at) {
        for (const auto id : missing) speak_again(id);
        pause = std::min<std::chrono::milliseconds>(pause * 2, kAgain);
        again_at = steady_clock::now() + pause;
      }
      base::MutexLock lock(mutex_);
      missing.clear();
      for (const auto id : others) {
        if (!arrived(id)) missing.insert(id);
      }
      if (missing.empty()) return missing;
      // A loss between still_live() and here only costs this short wait.
      const auto until = std::min(deadline, steady_clock::now() + kLate);
      changed_.wait_until(mutex_, until);
      if (steady_clock::now() >= deadline) return missing;
    }
  };
  // One that was never spoken to may be gone without a word to us: a connection tells.
  auto missing =
      wait_for([this](WorkerId id) STITCH_NO_THREAD_SAFETY_ANALYSIS { return ready_.contains(id); },
               [this](WorkerId id) { agent_.peers().reach(id); });
  if (!missing.empty()) return late("these did not want to leave within the time limit:", missing);

  std::map<WorkerId, Status> previous;
  auto pause = std::chrono::microseconds(200);
  for (std::uint64_t round = 1;; ++round) {
    const auto others = still_live();
    {
      base::MutexLock lock(mutex_);
      round_ = round;
      statuses_.clear();
    }
    const auto poll = [this, round](WorkerId id) { send(id, Step::poll, round, {}); };
    std::for_each(others.begin(), others.end(), poll);
    missing = wait_for([this](WorkerId id)
                           STITCH_NO_THREAD_SAFETY_ANALYSIS { return statuses_.contains(id); },
                       poll);
    if (!missing.empty()) return late("these did not answer within the time limit:", missing);
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
    // Messages that a lost connection took along are in the sums of one side only, and the two may
    // both be live for the leader: equal rounds must do once anybody has lost a peer.
    const bool balanced = sum.sent == sum.received || sum.lost > 0;
    if (busy.empty() && balanced && statuses == previous) break;
    previous = busy.empty() ? std::move(statuses) : std::map<WorkerId, Status>{};
    base::MutexLock lock(mutex_);
    changed_.wait_until(mutex_, std::min(deadline, steady_clock::now() + pause));
    if (steady_clock::now() >= deadline) {
      lock.unlock();
      return busy.empty()
                 ? Error(ErrorCode::timeout, "shutdown of " + to_string(agent_.self()) +
                                                 " was not graceful: messages are still in flight")
                 : late("calls are still running on", busy);
    }
    pause = std::min(pause * 2, std::chrono::microseconds(20'000));
  }
  agent_.peers().expect_closing();
  {
    base::MutexLock lock(mutex_);
    released_ = true;
  }
  const auto let_go = [this](WorkerId id) { send(id, Step::go, 0, {}); };
  const auto others = still_live();
  std::for_each(others.begin(), others.end(), let_go);
  // Close only when all have heard; a worker that closes after its answer counts as gone too.
  wait_for([this](WorkerId id) STITCH_NO_THREAD_SAFETY_ANALYSIS { return gone_.contains(id); },
           let_go);
  return std::nullopt;
}

}  // namespace stitch::rpc
