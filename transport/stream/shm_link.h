#pragma once

#include <memory>

#include "stitch/transport/stream/link.h"

namespace stitch::transport {

// Two rings of bytes in memory that two processes of one host and one user share, and an abstract
// unix socket between them: over it the memory is handed over, a sleeping side is woken, and the
// death of the other side is seen. Layout and rules: WIRE.md.

// A descriptor for the memory, without memory yet; empty, with errno, when the system refuses.
[[nodiscard]] base::Descriptor open_shm_memory() noexcept;

// The connecting side: makes the memory behind `memory`, from open_shm_memory(), and hands it over.
// Throws Error(disconnected) when the system refuses.
[[nodiscard]] std::unique_ptr<Link> offer_shm_link(base::Descriptor socket,
                                                   const base::Descriptor& memory);

// The accepting side, once `socket` is readable: takes the memory. Nothing when it has not come
// yet. Throws Error(protocol) when what came is no such memory, Error(disconnected) when the socket
// ended, Error(overloaded) when this process has no descriptor left for the memory.
[[nodiscard]] std::unique_ptr<Link> accept_shm_link(base::Descriptor& socket);

// Throws Error(unauthenticated) unless the process at the other end of the unix socket runs as this
// user.
void check_peer_user(int socket);

}  // namespace stitch::transport
