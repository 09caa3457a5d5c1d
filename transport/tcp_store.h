#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "stitch/transport/event_loop.h"
#include "stitch/transport/store.h"

namespace stitch::transport {

struct TcpStoreOptions {
  std::string host = "127.0.0.1";
  std::uint16_t port = 0;  // server: 0 picks a free one
  // A rendezvous port may be taken by the launcher's own store (torchrun). The server then listens
  // on the next free one of this many, and clients look for it there, telling it from others by the
  // handshake and by `job`.
  int port_span = 1;
  std::string job{};     // servers and clients of different jobs refuse each other
  std::string secret{};  // as EndpointOptions::secret; proved both ways before any request is read
  bool one_round = false;  // client: gives up when every port has been tried once
  std::chrono::milliseconds connect_timeout{
      30'000};  // also the limit of calls that have no timeout of their own
};

// The server half: holds the map. Runs on `loop`, which must outlive it. Its waiting requests cost
// no thread.
class TcpStoreServer {
 public:
  // Throws Error(disconnected) naming host and ports when none can be bound.
  TcpStoreServer(EventLoop& loop, const TcpStoreOptions& options);
  ~TcpStoreServer();
  [[nodiscard]] std::uint16_t port() const;

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

// A client. Runs on `loop`, which must outlive it; its methods must not be called on the loop's
// thread. Connects with jittered retries until connect_timeout: Error(disconnected) "tcp store at
// host:port cannot be reached: …" names the last cause, Error(unauthenticated) when the secrets
// differ.
[[nodiscard]] std::shared_ptr<Store> make_tcp_store(EventLoop& loop,
                                                    const TcpStoreOptions& options);

}  // namespace stitch::transport
