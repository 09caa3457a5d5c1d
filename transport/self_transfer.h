#pragma once

#include <chrono>
#include <memory>
#include <optional>

#include "stitch/transport/endpoint.h"

namespace stitch::transport {

// For an endpoint that is to be tried. It has a random secret of its own, so that nobody else who
// connects to it meanwhile is listened to; what it carries is not encrypted.
[[nodiscard]] EndpointOptions self_transfer_options();

// Has `endpoint` connect to itself and carry a frame and a buffer. Returns why that did not succeed
// within `limit`, nothing when it did. Blocks that long at most: an endpoint that does not answer
// may not end either, so a thread of its own ends it. Any thread but a callback's.
[[nodiscard]] std::optional<Error> try_self_transfer(std::unique_ptr<Endpoint> endpoint,
                                                     std::chrono::milliseconds limit);

}  // namespace stitch::transport
