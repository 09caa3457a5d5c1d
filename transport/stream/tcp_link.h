#pragma once

#include <memory>

#include "stitch/transport/stream/link.h"

namespace stitch::transport {

// A link over a connected TCP socket, which it makes non-blocking, without Nagle's delay.
[[nodiscard]] std::unique_ptr<Link> make_tcp_link(base::Descriptor socket);

// Whether a connected socket is its own peer: where nobody listens at a port of this host, one that
// connects there and happens to be given that very port meets itself.
[[nodiscard]] bool connects_itself(int socket);

}  // namespace stitch::transport
