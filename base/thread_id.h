#pragma once

#include <unistd.h>

#include <cstdint>

#include "stitch/base/forked.h"

namespace stitch::base {

namespace detail {
struct ThreadId {
  int id = 0;
  std::uint32_t fork = 0;
};
inline constinit thread_local ThreadId thread_id_here{};
}  // namespace detail

// The number by which the system, debuggers and /proc know this thread. Any thread.
[[nodiscard]] inline int this_thread_id() noexcept {
  detail::ThreadId& here = detail::thread_id_here;
  if (here.id == 0 || here.fork != fork_count()) [[unlikely]]
    here = {::gettid(), fork_count()};
  return here.id;
}

}  // namespace stitch::base
