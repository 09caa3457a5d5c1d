#pragma once

#include <memory>

#include "stitch/transport/endpoint.h"

namespace stitch::transport {

// Connects loopback endpoints of one process. Shared by its endpoints.
// Thread contract: any thread.
class LoopbackNetwork {
 public:
  LoopbackNetwork();
  ~LoopbackNetwork();

  // The network that all workers of this process share unless given another.
  [[nodiscard]] static std::shared_ptr<LoopbackNetwork> process_wide();

  class Impl;
  [[nodiscard]] Impl& impl() { return *impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

// An endpoint for workers of one process, with the contract of every endpoint. send() copies the
// bytes, so that they may be changed once it returns. One thread per endpoint. Addresses look like
// "loopback:17".
[[nodiscard]] std::unique_ptr<Endpoint> make_loopback_endpoint(
    EndpointOptions options, std::shared_ptr<LoopbackNetwork> network);

}  // namespace stitch::transport
