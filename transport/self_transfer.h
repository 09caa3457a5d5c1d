#pragma once

#include <chrono>
#include <memory>

#include "stitch/transport/endpoint.h"

namespace stitch::transport {

// Whether `endpoint` can connect to itself and carry a frame and a buffer unharmed within `limit`.
// Blocks that long at most: an endpoint that fails may not end either, and is left behind rather
// than waited for. Any thread but a callback's.
[[nodiscard]] bool passes_self_transfer(std::unique_ptr<Endpoint> endpoint,
                                        std::chrono::milliseconds limit);

}  // namespace stitch::transport
