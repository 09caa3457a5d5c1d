#pragma once

#include <memory>
#include <string>
#include <vector>

#include "stitch/transport/endpoint.h"

namespace stitch::transport {

// Which endpoints a worker uses. Transports, best first: "shm" and "tcp" are stitch's own
// (stream_endpoint.h), "tensorpipe-shm" and "uv" TensorPipe's (tensorpipe_endpoint.h), "channels"
// are those of TensorPipe's.
struct TransportChoice {
  std::vector<std::string> transports{"shm", "tcp"};
  std::vector<std::string> channels{"basic"};
  std::string bind_address = "127.0.0.1";
  std::vector<std::string> more_addresses{};  // of this host where "tcp" listens, too
};

// The endpoints for `choice`, without the transports that fail a self-transfer, which are reported
// on stderr with the reason. Throws Error(invalid_argument) for unknown names, Error(disconnected)
// with the reasons when nothing is left. Any thread.
[[nodiscard]] std::vector<std::unique_ptr<Endpoint>> make_endpoints(const EndpointOptions& options,
                                                                    TransportChoice choice);

}  // namespace stitch::transport
