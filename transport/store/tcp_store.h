#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "stitch/transport/store/store.h"
#include "stitch/transport/wire/encryption.h"
#include "stitch/transport/wire/secret_key.h"

namespace stitch::transport {

struct TcpStoreOptions {
  std::string host = "127.0.0.1";
  std::uint16_t port = 0;  // server: 0 picks a free one
  // Derived from the workers' secret; null without one. As between workers: both sides prove that
  // they know it before any request is read.
  std::shared_ptr<const SecretKey> key{};
  Encryption encryption = Encryption::on;
  bool one_round = false;  // client: fails when every address has been tried once
  std::chrono::milliseconds connect_timeout{
      30'000};  // also the limit of calls that have no timeout of their own
  // Client: connecting and all calls end by then, whatever their own limits are; a call after it
  // fails at once.
  std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();
  // Server: a limit for the memory of values, claims and waits of all clients; above it requests
  // fail with `overloaded`.
  std::size_t max_bytes = std::size_t{1} << 30;
  std::size_t max_clients = 8192;  // server: further ones are refused with `overloaded`
};

// The server, which has the values: a stream endpoint whose peers are clients of the store. The
// claims of a client end with its connection. "localhost" is 127.0.0.1 and ::1, where both exist;
// another name is all addresses that it stands for and this host has, or, where those are loopback
// addresses or other hosts' only, every address of this host. Any thread.
class TcpStoreServer {
 public:
  // Throws Error(disconnected) naming host and port when that cannot be bound.
  explicit TcpStoreServer(const TcpStoreOptions& options);
  // Ends all connections; the port is free when it returns.
  ~TcpStoreServer();
  [[nodiscard]] std::uint16_t port() const;
  // "tcp://127.0.0.1:29500", ...
  [[nodiscard]] const std::vector<std::string>& addresses() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// A client, with an endpoint of its own. Connects to each address of the host in turn, with
// jittered retries until connect_timeout: Error(disconnected) "tcp store at host:port cannot be
// reached: ..." names the last cause for each address. At once: Error(protocol) when something
// other than a store of this version listens there, Error(unauthenticated) when the secrets differ.
// With a secret, calls of a connection that is tampered with fail with `unauthenticated`.
[[nodiscard]] std::shared_ptr<Store> make_tcp_store(const TcpStoreOptions& options);

}  // namespace stitch::transport
