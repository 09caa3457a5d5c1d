#pragma once

#include <memory>

#include "stitch/transport/stream/link.h"

namespace stitch::transport {

// A link over a connected TCP socket, which it makes non-blocking, without Nagle's delay.
[[nodiscard]] std::unique_ptr<Link> make_tcp_link(base::Descriptor socket);

// Whether a connected socket is its own peer: when no process listens at a port of this host, a
// socket that connects to it and is given that very port connects to itself.
[[nodiscard]] bool connects_itself(int socket);

}  // namespace stitch::transport
