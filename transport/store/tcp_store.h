#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "stitch/base/event_loop.h"
#include "stitch/transport/store/store.h"
#include "stitch/transport/wire/secret_key.h"

namespace stitch::transport {

struct TcpStoreOptions {
  std::string host = "127.0.0.1";
  std::uint16_t port = 0;  // server: 0 picks a free one
  // The rendezvous port may be used by the launcher's own store (torchrun). The server then listens
  // on the next free one of this many ports, and clients try them all: the handshake and `job`
  // identify the server.
  int port_span = 1;
  std::string job{};  // servers and clients of different jobs refuse each other
  // Derived from the workers' secret; null without one. Both sides prove that they know it before
  // any request is read, and everything after that is encrypted and authenticated.
  std::shared_ptr<const SecretKey> key{};
  bool one_round = false;  // client: fails when every port has been tried once
  std::chrono::milliseconds connect_timeout{
      30'000};  // also the limit of calls that have no timeout of their own
  // Client: connecting and all calls end by then, whatever their own limits are; a call after it
  // fails at once.
  std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();
  // Server: a limit for the memory of values and waits of all clients; above it requests fail with
  // `overloaded`. The same limit applies to frames that are incomplete or unsent; above it
  // connections end with `overloaded`.
  std::size_t max_bytes = std::size_t{1} << 30;
  std::size_t max_clients = 8192;    // server: further ones are refused with `overloaded`
  std::size_t max_handshakes = 512;  // server: at a time
};

// The server, which has the map. Runs on `loop`, which must outlive it. Waiting requests need no
// thread. Connections whose handshake has not succeeded take little memory and are closed after ten
// seconds; when there are too many the oldest is closed.
class TcpStoreServer {
 public:
  // Throws Error(disconnected) naming host and ports when none can be bound.
  TcpStoreServer(base::EventLoop& loop, const TcpStoreOptions& options);
  ~TcpStoreServer();
  [[nodiscard]] std::uint16_t port() const;

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

// A client. Runs on `loop`, which must outlive it; its methods must not be called on the loop's
// thread. Connects with jittered retries until connect_timeout: Error(disconnected) "tcp store at
// host:port cannot be reached: …" names the last cause, Error(protocol) when that was something
// other than a store of this job, Error(unauthenticated) when the secrets differ. With a secret,
// all calls of a connection that is tampered with fail with `unauthenticated`.
[[nodiscard]] std::shared_ptr<Store> make_tcp_store(base::EventLoop& loop,
                                                    const TcpStoreOptions& options);

}  // namespace stitch::transport
