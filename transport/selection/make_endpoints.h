#pragma once

#include <cstdint>
#include <functional>
#include <map>
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
};

// The endpoints for `choice`, without the transports that fail a self-transfer; stderr says which
// those are and why. Throws Error(invalid_argument) for unknown names, Error(disconnected) with the
// reasons when nothing is left. Any thread.
[[nodiscard]] std::vector<std::unique_ptr<Endpoint>> make_endpoints(const EndpointOptions& options,
                                                                    TransportChoice choice);

// Whether the endpoint that `make` makes passes a self-transfer. A success is remembered under
// `key` for the life of the process: it is a fact about this host; a failure may pass, when an
// address appears. A failure is counted, and said on stderr with its reason unless the last one
// under this key had the same. `key` begins with the name of what is tried, which ends at its last
// space. A trial takes milliseconds, five seconds when it hangs.
[[nodiscard]] bool passes_once(const std::string& key,
                               const std::function<std::unique_ptr<Endpoint>()>& make);

// How often a trial has failed in this process, by the name of what was tried.
[[nodiscard]] std::map<std::string, std::int64_t> failed_trials();

}  // namespace stitch::transport
