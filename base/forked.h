#pragma once

#include <atomic>
#include <cstdint>

namespace stitch::base {

// Descriptors and forks. A forked child's copies of descriptors would keep its parent's connections
// open, so that peers do not notice when the parent dies: every descriptor that is registered here
// is closed in the child before fork() returns there. The owner of a descriptor or a worker stores
// the fork count when it is made, and treats the object as empty once that has changed.
//
// Thread contract: any thread. No locks: another thread may be anywhere in this code when a thread
// forks. A fork between the creation of a descriptor and its registration misses that descriptor.

namespace detail {
inline constinit std::atomic<std::uint32_t> forks_so_far{0};
}

// The number of forks between the first process and this one.
[[nodiscard]] inline std::uint32_t fork_count() noexcept {
  return detail::forks_so_far.load(std::memory_order_relaxed);
}

// Registers `fd`: it will be closed in children of this process. Does nothing for numbers below 0.
void close_in_children(int fd) noexcept;
// Removes `fd`. To be called before it is closed.
void keep_in_children(int fd) noexcept;

// Calls `visit` with each registered descriptor. One that another thread removes meanwhile may be
// visited, or not.
void visit_closed_in_children(void (*visit)(int fd)) noexcept;

}  // namespace stitch::base
