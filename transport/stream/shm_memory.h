#pragma once

#include <cstddef>

#include "stitch/base/descriptor.h"

namespace stitch::transport {

// The memory of a shared-memory link: how it is laid out, made by the connecting side, and handed
// over to the accepting side (SCM_RIGHTS) through a Unix socket. Layout and rules: WIRE.md. Thread
// contract: any thread.
struct ShmLayout {
  static constexpr std::size_t kRingBytes = std::size_t{1} << 20;  // one for each direction
  static constexpr std::size_t kControlBytes = 4096;               // before the rings
  static constexpr std::size_t kMemoryBytes = kControlBytes + 2 * kRingBytes;
};

// A descriptor for the memory, still of size 0; empty, with errno, when the system refuses.
[[nodiscard]] base::Descriptor open_shm_memory() noexcept;

// The connecting side: gives `memory`, from open_shm_memory(), its size for good and sends it.
// Throws Error(disconnected) when the system refuses.
void offer_shm_memory(int socket, const base::Descriptor& memory);

// The accepting side, once `socket` is readable: receives and checks the memory. Empty when it has
// not come yet. Throws Error(protocol) when what came is no such memory, Error(disconnected) when
// the socket ended, Error(overloaded) when this process has no descriptor left for the memory.
[[nodiscard]] base::Descriptor accept_shm_memory(int socket);

// Gives the whole pages among these bytes of the memory back to the system; what is in them is
// lost. Does nothing where the system counts pages that are touched: it might not grant them again.
void release_shm_pages(std::byte* from, std::size_t bytes) noexcept;

// Throws Error(unauthenticated) unless the process at the other end of the Unix socket runs as this
// user, and, without a secret, is one that this process can see: containers that share a network,
// but no processes, have equal numbers of users.
void check_peer_user(int socket, bool has_secret);

}  // namespace stitch::transport
