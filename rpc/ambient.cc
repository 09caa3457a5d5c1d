#include "stitch/rpc/ambient.h"

#include <utility>

#include "stitch/rpc/agent.h"

namespace stitch {

Ambient& Ambient::current() noexcept {
  thread_local Ambient ambient;
  return ambient;
}

void run_continuation(Ambient ambient, UniqueFunction<void()> task) {
  if (!ambient.agent) {
    const AmbientScope scope(std::move(ambient));
    task();
    return;
  }
  const auto agent = ambient.agent;
  agent->post([ambient = std::move(ambient), task = std::move(task)]() mutable {
    const AmbientScope scope(std::move(ambient));
    task();
  });
}

std::stop_token current_stop_token() { return Ambient::current().stop; }

}  // namespace stitch
