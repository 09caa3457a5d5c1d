#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "stitch/transport/endpoint.h"

namespace stitch::transport {

// What happens to one message on its way through a LoopbackNetwork.
struct Fate {
  bool drop = false;  // it vanishes; the sender thinks it was sent
  bool fail = false;  // the connection breaks instead, at both ends
  int copies = 1;     // more than 1: duplicated
  std::chrono::microseconds delay{
      0};  // delivered later; later messages of the connection may overtake it (reorder)
};

// Connects loopback endpoints of one process. Shared by its endpoints.
// Thread contract: any thread.
class LoopbackNetwork {
 public:
  // Decides the fate of the `sequence`-th message (from 0, counted over the whole network) from one
  // worker id to another. Handshakes are not shown to it. Called on the sending thread, no lock
  // held.
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

// An endpoint for workers of one process: same contract as the others, bytes copied at send (so the
// sender may change them once send() returns), one reader thread per endpoint. Addresses look like
// "loopback:17".
[[nodiscard]] std::unique_ptr<Endpoint> make_loopback_endpoint(
    EndpointOptions options, std::shared_ptr<LoopbackNetwork> network);

}  // namespace stitch::transport
