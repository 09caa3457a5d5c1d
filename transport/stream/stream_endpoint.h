#pragma once

#include <memory>
#include <string>
#include <vector>

#include "stitch/transport/endpoint.h"
#include "stitch/transport/stream/socket_address.h"

namespace stitch::transport {

// Names of transports in order of preference, out of: "shm" (memory shared by processes of one host
// and user), "tcp".
struct StreamOptions {
  std::vector<std::string> transports{"shm", "tcp"};
  std::string bind_address =
      "127.0.0.1";  // for tcp: a numeric address of this host that peers can reach
  std::vector<std::string> more_addresses{};  // of this host where tcp listens, too
};

// stitch's own endpoint: two poller threads for all connections, of which at most one polls at a
// time. They busy-poll while traffic is hot and sleep otherwise; a thread that waits for an answer
// polls itself (Endpoint::help). Few half-open connections are kept (half_open.h). Addresses look
// like "shm://name" and "tcp://127.0.0.1:4711". Throws Error(invalid_argument) naming an unknown
// transport or a wrong bind address. `bound`: sockets for tcp, instead of a new one at the bind
// address; peers that connect before listen() wait.
[[nodiscard]] std::unique_ptr<Endpoint> make_stream_endpoint(
    EndpointOptions options, StreamOptions stream, std::vector<ListeningSocket> bound = {});

}  // namespace stitch::transport
