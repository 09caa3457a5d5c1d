#include <exception>

#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/calls.h"

namespace stitch {

void fault_step() noexcept {
  try {
    if (const auto& faults = rpc::current_agent()->faults()) faults->on_step();
  } catch (const std::exception&) {
    // There is no worker that could count it.
  }
}

}  // namespace stitch
