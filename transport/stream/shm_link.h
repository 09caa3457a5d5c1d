#pragma once

#include <memory>

#include "stitch/transport/stream/link.h"

namespace stitch::transport {

// Two byte rings in memory that two processes of one host and one user share, and a Unix socket
// between them: the memory is handed over through it, it is the doorbell of a side that sleeps, and
// its end tells the other side that the process has died. Layout and rules: WIRE.md. A position
// that the peer writes outside of its ring makes the link end with Error(protocol).

// The connecting side: hands `memory`, from open_shm_memory(), over. Throws as offer_shm_memory().
[[nodiscard]] std::unique_ptr<Link> offer_shm_link(base::Descriptor socket,
                                                   const base::Descriptor& memory);

// The accepting side, once `socket` is readable: null when the memory has not come yet; `socket` is
// taken otherwise. Throws as accept_shm_memory().
[[nodiscard]] std::unique_ptr<Link> accept_shm_link(base::Descriptor& socket);

}  // namespace stitch::transport
