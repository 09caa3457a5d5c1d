#pragma once

#include <atomic>
#include <cstdint>

namespace stitch::base {

// What a fork means for this process. A forked child has copies of its parent's descriptors but not
// of its threads: as long as the child lives its copies keep the parent's connections open, so that
// peers do not notice when the parent dies; and a shutdown(2) of such a copy ends the parent's
// connection. So in a child, before fork() returns, every descriptor that was entered here is
// closed. Objects of the parent are told by the number of forks since: whoever holds a descriptor
// or a worker notes the number when it is made, and takes nothing for its own when it has changed.
//
// Thread contract: any thread. No locks: another thread may be anywhere in here when a thread
// forks. A fork in the instant between the making of a descriptor and its entry misses that one.

namespace detail {
inline constinit std::atomic<std::uint32_t> forks_so_far{0};
}

// How many forks lie between the first process and this one.
[[nodiscard]] inline std::uint32_t fork_count() noexcept {
  return detail::forks_so_far.load(std::memory_order_relaxed);
}

// Has `fd` closed in children of this process. Does nothing for numbers below 0.
void close_in_children(int fd) noexcept;
// No longer. To be called before `fd` is closed.
void keep_in_children(int fd) noexcept;

}  // namespace stitch::base
