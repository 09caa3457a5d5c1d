#pragma once

#include <cstdint>

#include "stitch/transport/endpoint.h"

namespace stitch::rpc::test {

// What a stranger does over a connection that it has opened under a worker's name, by `manner`: 0
// sends `evil` at once, 1 is silent, 2 answers an OFFER by CONFIRM and 3 by ACCEPT, each with
// `token` and followed by `evil` as if the connection were bound.
[[nodiscard]] transport::ConnectionEvents stranger_events(int manner, std::uint64_t token,
                                                          transport::Message evil);

}  // namespace stitch::rpc::test
