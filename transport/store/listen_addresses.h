#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <vector>

namespace stitch::transport {

// The addresses on which a store server listens for `host`, in the order to try. A literal address
// is taken as it is. A name may stand for an address that only other hosts see, or for 127.0.1.1 in
// /etc/hosts: so for names other than "localhost" all addresses of this host come last. Blocks for
// the resolver. Throws Error(disconnected) when the name cannot be resolved; `store` begins its
// text. Any thread.
[[nodiscard]] std::vector<sockaddr_storage> listen_addresses(const std::string& host,
                                                             const std::string& store);

// Of an IPv4 or IPv6 address.
void set_port(sockaddr_storage& address, std::uint16_t port);
[[nodiscard]] std::uint16_t port_of(const sockaddr_storage& address);

}  // namespace stitch::transport
