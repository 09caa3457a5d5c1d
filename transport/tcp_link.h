#pragma once

#include <memory>

#include "stitch/transport/link.h"

namespace stitch::transport {

// A link over a connected TCP socket, which it makes non-blocking, without Nagle's delay.
[[nodiscard]] std::unique_ptr<Link> make_tcp_link(Descriptor socket);

}  // namespace stitch::transport
