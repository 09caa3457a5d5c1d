#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <string>

namespace stitch::transport {

// A socket's address in the form of the system calls. Thread contract: a value.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t bytes = 0;
  [[nodiscard]] const sockaddr* get() const noexcept {
    return reinterpret_cast<const sockaddr*>(&storage);
  }
};

// Characters of an abstract Unix socket's name; the system allows 107.
inline constexpr std::size_t kMaxAbstractName = 100;

// The address of an abstract Unix socket: it has no file and ends with its process. REQUIRES:
// `name` has at most kMaxAbstractName characters.
[[nodiscard]] SocketAddress abstract_address(const std::string& name);

// "127.0.0.1:4711" or "[::1]:4711": the address that a TCP socket is bound to.
[[nodiscard]] std::string bound_tcp_address(int socket);

}  // namespace stitch::transport
