#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "stitch/transport/endpoint.h"

namespace stitch::transport {

// A fault to inject into the delivery of one message.
struct Fate {
  bool drop = false;  // lost, while its send succeeds
  bool fail = false;  // the connection breaks instead, at both ends
  int copies = 1;     // more than 1: duplicated
  std::chrono::microseconds delay{
      0};  // delivered later; later messages of the connection may overtake it (reorder)
};

// Connects loopback endpoints of one process. Shared by its endpoints.
// Thread contract: any thread.
class LoopbackNetwork {
 public:
  // Decides on the fault of the `sequence`-th message (from 0, counted over the whole network) from
  // one worker id to another. Not called for handshakes. Called on the sending thread without a
  // lock.
  using Judge = std::function<Fate(std::uint32_t from, std::uint32_t to, std::uint64_t sequence,
                                   const Message& message)>;

  LoopbackNetwork();
  ~LoopbackNetwork();
  void set_judge(Judge judge);
  [[nodiscard]] std::uint64_t messages() const;  // sent so far

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
