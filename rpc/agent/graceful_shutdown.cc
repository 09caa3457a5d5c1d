#include "stitch/rpc/agent/graceful_shutdown.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/deadline.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/agent/stop_signals.h"
#include "stitch/rpc/message/frame_kinds.h"

namespace stitch::rpc {

using std::chrono::steady_clock;

GracefulShutdown::GracefulShutdown(Agent& agent)
    : agent_(agent),
      protocol_(agent.self(), [&agent](WorkerId id) { return agent.peers().find(id); }) {}

GracefulShutdown::Lives GracefulShutdown::live() const {
  Lives lives;
  for (auto& info : agent_.peers().infos()) {
    if (info.id == agent_.self().id || !agent_.peers().lost(info))
      lives.emplace(info.id, std::move(info));
  }
  return lives;
}

ShutdownProtocol::Status GracefulShutdown::own_status() const {
  const auto activity = agent_.activity();
  return {activity.busy, activity.sent, activity.received, agent_.peers().lost_lives()};
}

void GracefulShutdown::send(const WorkerInfo& to, const ShutdownProtocol::Message& said) {
  const auto status =
      said.step == ShutdownProtocol::Step::status ? own_status() : ShutdownProtocol::Status{};
  OutMessage message(wire::kLeave);
  base::ByteWriter out(message.frame.body());
  out.write(said.step);
  out.write(said.round);
  out.write(status.busy);
  out.write(status.sent);
  out.write(status.received);
  out.write(status.lost);
  agent_.send_while_possible(to, std::move(message));
}

void GracefulShutdown::tell_that_all_leave(steady_clock::time_point limit) noexcept {
  // The others may have the same limit, and wait for GO.
  const auto now = steady_clock::now();
  const auto deadline = now + std::max(limit - now, steady_clock::duration::zero()) / 2;
  agent_.for_each_extension([&](Extension& extension) { extension.on_all_leave(deadline); });
}

void GracefulShutdown::carry_out(const ShutdownProtocol::Effects& effects, const Lives& lives) {
  if (effects.expect_closing) agent_.peers().expect_closing();
  for (const auto& each : effects.sends) {
    const auto life = lives.find(each.to);
    if (life != lives.end()) send(life->second, each.message);
  }
  for (const WorkerId id : effects.reach) agent_.peers().reach(id);
}

void GracefulShutdown::on_message(InMessage message) {
  base::ByteReader in(message.view.body(), "shutdown message");
  ShutdownProtocol::Message said;
  said.step = in.read<ShutdownProtocol::Step>();
  said.round = in.read<std::uint64_t>();
  said.status = {in.read<std::uint64_t>(), in.read<std::uint64_t>(), in.read<std::uint64_t>(),
                 in.read<std::uint64_t>()};
  in.expect_end();
  ShutdownProtocol::Effects effects;
  {
    base::MutexLock lock(mutex_);
    effects = protocol_.on_message(message.from, said);
  }
  if (!effects.sends.empty()) carry_out(effects, {{message.from.id, message.from}});
  if (said.step == ShutdownProtocol::Step::poll) return;
  base::MutexLock lock(mutex_);
  if (effects.may_close) protocol_.on_answered();
  ++events_;
  changed_.notify_all();
}

void GracefulShutdown::on_peer_lost(const WorkerInfo& peer) {
  base::MutexLock lock(mutex_);
  protocol_.on_peer_lost(peer);
  ++events_;
  changed_.notify_all();
}

void GracefulShutdown::on_peer_joining(const WorkerInfo& peer) {
  if (peer.epoch == 0) return;  // the first of all
  WorkerInfo former = peer;
  --former.epoch;
  on_peer_lost(former);
}

void GracefulShutdown::on_peer_joined() {
  base::MutexLock lock(mutex_);
  protocol_.on_peer_joined();
  ++events_;
  changed_.notify_all();
}

std::optional<ShutdownProtocol::AwaitedWorkers> GracefulShutdown::waiting() const {
  base::MutexLock lock(mutex_);
  return protocol_.waiting();
}

std::optional<ShutdownProtocol::AwaitedWorkers> GracefulShutdown::waited() const {
  base::MutexLock lock(mutex_);
  return protocol_.waited();
}

steady_clock::time_point GracefulShutdown::deadline() const {
  base::MutexLock lock(mutex_);
  return protocol_.deadline();
}

std::optional<Error> GracefulShutdown::run(steady_clock::time_point wait,
                                           std::chrono::nanoseconds limit) {
  // A signal wakes no thread that waits here.
  constexpr std::chrono::milliseconds kLook{100};
  bool told = false;  // that all leave
  bool said = false;  // for whom it waits
  const auto began = steady_clock::now();
  const auto say_at = base::deadline_after(limit);
  {
    base::MutexLock lock(mutex_);
    protocol_.begin(wait, limit);
  }
  for (;;) {
    ShutdownProtocol::View view;
    std::uint64_t events = 0;
    {
      base::MutexLock lock(mutex_);
      view.changes = protocol_.changes();
      events = events_;
    }
    const Lives lives = live();
    for (const auto& each : lives) view.live.insert(each.first);
    ShutdownProtocol::Effects effects;
    {
      base::MutexLock lock(mutex_);
      if (const auto stop = stop_requested_at())
        protocol_.wait_until(base::deadline_after(
            limit - (steady_clock::now() - std::max<steady_clock::time_point>(began, *stop))));
      effects = protocol_.on_time(steady_clock::now(), view);
    }
    carry_out(effects, lives);
    if (effects.sample) {
      const auto own = own_status();
      {
        base::MutexLock lock(mutex_);
        effects = protocol_.on_sample(steady_clock::now(), own);
      }
      // Before GO is said: one that has closed may start again at once.
      if (effects.expect_closing && !std::exchange(told, true)) tell_that_all_leave(deadline());
      carry_out(effects, lives);
    }
    base::MutexLock lock(mutex_);
    if (protocol_.ended()) {
      auto error = protocol_.error();
      lock.unlock();
      if (!error && !told) tell_that_all_leave(deadline());
      return error;
    }
    const auto now = steady_clock::now();
    if (!said && now >= say_at) {
      said = true;
      if (const auto text = protocol_.waits_for_others())
        std::fprintf(stderr, "stitch: %s\n", text->c_str());
    }
    const auto next =
        stop_signals_taken() ? std::min(protocol_.next(), now + kLook) : protocol_.next();
    while (events_ == events && steady_clock::now() < next) changed_.wait_until(mutex_, next);
  }
}

}  // namespace stitch::rpc
