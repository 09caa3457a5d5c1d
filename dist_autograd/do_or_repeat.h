#pragma once

#include <chrono>
#include <new>
#include <utility>

#include "stitch/base/patience.h"
#include "stitch/rpc/agent/agent.h"

namespace stitch::dist_autograd {

// Between two tries of what has no memory.
inline constexpr std::chrono::milliseconds kRepeatDelay{10};

// Does `step`, once this worker has the memory for it: here, as base::patiently() does; else on the
// agent's loop, again and again. A step that has had no memory is called again from its beginning,
// so it keeps elsewhere what must not be done twice; it keeps alive what it needs. Of 48 bytes at
// most, it takes no memory to be kept but a little of the reserve. Any thread.
template <class Step>
void do_or_repeat(rpc::Agent& agent, Step step) {
  static_assert(sizeof(Step) <= 48);
  try {
    base::patiently(step);
  } catch (const std::bad_alloc&) {
    agent.loop().call_at(rpc::Clock::now() + kRepeatDelay, std::move(step));
  }
}

}  // namespace stitch::dist_autograd
