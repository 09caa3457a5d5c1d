#include "stitch/rpc/agent/graceful_shutdown.h"

#include <exception>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/patience.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/message/frame_kinds.h"

namespace stitch::rpc {

using std::chrono::steady_clock;

GracefulShutdown::GracefulShutdown(Agent& agent)
    : agent_(agent),
      protocol_(agent.self(), [&agent](WorkerId id) { return agent.peers().find(id); }) {}

std::set<WorkerId> GracefulShutdown::live() const {
  std::set<WorkerId> ids;
  for (const auto& info : agent_.peers().infos()) {
    if (info.id == agent_.self().id || !agent_.peers().lost(info.id)) ids.insert(info.id);
  }
  return ids;
}

ShutdownProtocol::Status GracefulShutdown::own_status() const {
  const auto activity = agent_.activity();
  return {activity.busy, activity.sent, activity.received, agent_.peers().lost_lives()};
}

void GracefulShutdown::send(WorkerId to, const ShutdownProtocol::Message& said) {
  const auto status = said.step == ShutdownProtocol::Step::status
                          ? base::patiently([this] { return own_status(); })
                          : ShutdownProtocol::Status{};
  try {
    base::patiently([&] {
      OutMessage message(wire::kLeave);
      base::ByteWriter out(message.frame.body());
      out.write(said.step);
      out.write(said.round);
      out.write(status.busy);
      out.write(status.sent);
      out.write(status.received);
      out.write(status.lost);
      agent_.send_control(agent_.peers().find(to), std::move(message));
    });
  } catch (const std::exception&) {
    // The peer is lost, or the message will be repeated: continue with the others.
  }
}

void GracefulShutdown::carry_out(const ShutdownProtocol::Effects& effects) {
  if (effects.expect_closing) agent_.peers().expect_closing();
  for (const auto& [to, said] : effects.sends) send(to, said);
  for (const WorkerId id : effects.reach) base::patiently([&] { agent_.peers().reach(id); });
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
  base::patiently([&] {
    base::MutexLock lock(mutex_);
    effects = protocol_.on_message(message.from.id, said);
  });
  carry_out(effects);
  if (said.step == ShutdownProtocol::Step::poll) return;
  base::MutexLock lock(mutex_);
  if (effects.may_close) protocol_.on_answered();
  ++events_;
  changed_.notify_all();
}

void GracefulShutdown::on_peer_lost(const WorkerInfo& peer) {
  base::MutexLock lock(mutex_);
  protocol_.on_peer_lost(peer.id);
  ++events_;
  changed_.notify_all();
}

std::optional<ShutdownProtocol::Waiting> GracefulShutdown::waiting() const {
  base::MutexLock lock(mutex_);
  return protocol_.waiting();
}

std::optional<Error> GracefulShutdown::run(steady_clock::time_point deadline) {
  {
    base::MutexLock lock(mutex_);
    protocol_.begin(deadline);
  }
  for (;;) {
    ShutdownProtocol::View view;
    std::uint64_t events = 0;
    {
      base::MutexLock lock(mutex_);
      view.losses = protocol_.losses();
      events = events_;
    }
    view.live = base::patiently([this] { return live(); });
    ShutdownProtocol::Effects effects;
    base::patiently([&] {
      base::MutexLock lock(mutex_);
      effects = protocol_.on_time(steady_clock::now(), view);
    });
    carry_out(effects);
    if (effects.sample) {
      const auto own = base::patiently([this] { return own_status(); });
      base::patiently([&] {
        base::MutexLock lock(mutex_);
        effects = protocol_.on_sample(steady_clock::now(), own);
      });
      carry_out(effects);
    }
    base::MutexLock lock(mutex_);
    if (protocol_.ended()) return protocol_.error();
    while (events_ == events && steady_clock::now() < protocol_.next())
      changed_.wait_until(mutex_, protocol_.next());
  }
}

}  // namespace stitch::rpc
