#include "stitch/rpc/agent/send_reliably.h"

#include <chrono>
#include <exception>

namespace stitch::rpc {

namespace {
constexpr std::chrono::milliseconds kResendDelay{10};
}  // namespace

// A timer for which there is no memory runs again: it keeps what it needs.
void send_reliably(Agent& agent, const WorkerInfo& to, const std::function<OutMessage()>& make) {
  try {
    agent.send_control(to, make());
  } catch (...) {
    // Over the limits: it will never fit.
    if (to_error(std::current_exception()).code() == ErrorCode::out_of_range) return;
    if (agent.stopped() || agent.peers().lost(to)) return;
    agent.loop().call_at(Clock::now() + kResendDelay, [weak = agent.weak_from_this(), to, make] {
      if (const auto again = weak.lock()) send_reliably(*again, to, make);
    });
  }
}

}  // namespace stitch::rpc
