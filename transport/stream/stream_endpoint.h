#pragma once

#include <memory>
#include <string>
#include <vector>

#include "stitch/transport/endpoint.h"

namespace stitch::transport {

// Names of transports in order of preference; of: "shm" (memory shared by processes of one host and
// user), "tcp".
struct StreamOptions {
  std::vector<std::string> transports{"shm", "tcp"};
  std::string bind_address =
      "127.0.0.1";  // for tcp: a numeric address of this host that peers can reach
};

// stitch's own endpoint: two threads for all connections, of which one polls at a time; it spins
// while traffic is hot and sleeps otherwise, and threads that wait for an answer poll themselves
// (Endpoint::help). Of strangers' connections few are kept (half_open.h). Addresses look like
// "shm://name" and "tcp://127.0.0.1:4711". Throws Error(invalid_argument) naming an unknown
// transport or a wrong bind address.
[[nodiscard]] std::unique_ptr<Endpoint> make_stream_endpoint(EndpointOptions options,
                                                             StreamOptions stream);

}  // namespace stitch::transport
