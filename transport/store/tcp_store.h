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
  // A rendezvous port may be taken by the launcher's own store (torchrun). The server then listens
  // on the next free one of this many, and clients look for it there, telling it from others by the
  // handshake and by `job`.
  int port_span = 1;
  std::string job{};  // servers and clients of different jobs refuse each other
  // Of the workers' secret; null without one. Both sides prove it before any request is read, and
  // all that follows is encrypted and authenticated.
  std::shared_ptr<const SecretKey> key{};
  bool one_round = false;  // client: gives up when every port has been tried once
  std::chrono::milliseconds connect_timeout{
      30'000};  // also the limit of calls that have no timeout of their own
  // Server: what its clients together may have it hold in values and waits; beyond it requests fail
  // with `overloaded`. As much again in frames that are incomplete or not taken; beyond it
  // connections end with `overloaded`.
  std::size_t max_bytes = std::size_t{1} << 30;
  std::size_t max_clients = 8192;    // server: further ones are refused with `overloaded`
  std::size_t max_handshakes = 512;  // server: under way at a time
};

// The server half: holds the map. Runs on `loop`, which must outlive it. Its waiting requests cost
// no thread. Clients that have not shaken hands are strangers: they cost little, are dropped after
// ten seconds, and the oldest of too many are dropped at once.
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
// else than a store of this job, Error(unauthenticated) when the secrets differ. With a secret, a
// connection that anybody tampers with fails all its calls with `unauthenticated`.
[[nodiscard]] std::shared_ptr<Store> make_tcp_store(base::EventLoop& loop,
                                                    const TcpStoreOptions& options);

}  // namespace stitch::transport
