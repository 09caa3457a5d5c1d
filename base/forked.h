#pragma once

#include <atomic>
#include <cstdint>

namespace stitch::base {

// Descriptors and forks. A forked child has copies of its parent's descriptors but not of its
// threads: while the child lives, its copies keep the parent's connections open, so that peers do
// not notice when the parent dies; and a shutdown(2) of such a copy ends the parent's connection.
// So every descriptor that is registered here is closed in the child before fork() returns there.
// Objects recognize that they were inherited by the fork count: the owner of a descriptor or a
// worker stores the count when it is made, and treats the object as empty once it has changed.
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
