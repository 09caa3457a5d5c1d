#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "stitch/transport/endpoint.h"
#include "stitch/transport/tensorpipe/tensorpipe_endpoint.h"

namespace stitch::transport {

// Makes an endpoint with exactly these transports and channels.
using MakeEndpoint = std::function<std::unique_ptr<Endpoint>(const TensorPipeOptions& options)>;

// The wanted transports and channels that pass a self-transfer, in the wanted order; each
// combination is tried once a process. Throws Error(invalid_argument) for unknown names and
// addresses, Error(disconnected) when nothing is left. Any thread.
[[nodiscard]] TensorPipeOptions select_usable(TensorPipeOptions wanted, const MakeEndpoint& make);

// The reason for which `address` is not usable for an endpoint that uses `transports`, as text;
// empty when it can be tried.
[[nodiscard]] std::string problem_with_address(const std::string& address,
                                               const std::vector<std::string>& transports);

}  // namespace stitch::transport
