#pragma once

#include <memory>
#include <string>
#include <vector>

#include "stitch/transport/endpoint.h"

namespace stitch::transport {

// Names of transports and channels in order of preference; only viable ones that pass a
// self-transfer are used.
struct TensorPipeOptions {
  std::vector<std::string> transports{"tensorpipe-shm", "uv"};  // of: tensorpipe-shm, uv
  std::vector<std::string> channels{"basic"};                   // of: basic, cma
  std::string bind_address = "127.0.0.1";  // for uv: an address of this host that peers can reach
};

// An endpoint over TensorPipe. Throws Error(invalid_argument) naming an unknown transport or
// channel and listing the known ones, Error(disconnected) when none of them passes a self-transfer.
// Addresses look like "tensorpipe-shm://…" and "uv://127.0.0.1:4711".
[[nodiscard]] std::unique_ptr<Endpoint> make_tensorpipe_endpoint(EndpointOptions options,
                                                                 TensorPipeOptions tensorpipe);

}  // namespace stitch::transport
