#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "stitch/transport/ip_address.h"
#include "stitch/transport/stream/socket_address.h"

// Where TCP stores are.
namespace stitch::transport {

// "tcp store at 127.0.0.1:29500", "tcp store at [::1]:29500".
[[nodiscard]] std::string store_name(const std::string& host, std::uint16_t port);
// The addresses that `host` stands for, each once; "localhost" is 127.0.0.1 and ::1. Blocks for the
// resolver. Throws Error(disconnected) when the name cannot be resolved.
[[nodiscard]] std::vector<IpAddress> store_addresses(const std::string& host, std::uint16_t port);
// Sockets that listen there, as TcpStoreServer says; all at the same port where `port` is 0. Throws
// Error(disconnected) naming the address that cannot be bound.
[[nodiscard]] std::vector<ListeningSocket> listen_for_store(const std::string& host,
                                                            std::uint16_t port);

}  // namespace stitch::transport
