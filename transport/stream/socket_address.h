#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <string>

#include "stitch/base/descriptor.h"
#include "stitch/base/error.h"
#include "stitch/transport/ip_address.h"

namespace stitch::transport {

// A socket's address in the form of the system calls. Thread contract: a value.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t bytes = 0;
  [[nodiscard]] const sockaddr* get() const noexcept {
    return reinterpret_cast<const sockaddr*>(&storage);
  }
};

// What an errno of a system call for a connection means: `overloaded` where this process or its
// host is short of something, which says nothing about the other side, else `disconnected`.
[[nodiscard]] Error socket_error(int error);

// Characters of an abstract Unix socket's name; the system allows 107.
inline constexpr std::size_t kMaxAbstractName = 100;

// The address of an abstract Unix socket: it has no file and ends with its process. REQUIRES:
// `name` has at most kMaxAbstractName characters.
[[nodiscard]] SocketAddress abstract_address(const std::string& name);

struct ListeningSocket {
  base::Descriptor socket;
  std::string address;  // "shm://name" or "tcp://127.0.0.1:4711", for peers
};
// A socket that listens there; empty, with errno, when that is not possible. `reuse`: of TCP,
// whose port may have been used a moment ago, or be used again a moment after its end.
[[nodiscard]] base::Descriptor listening_socket(const sockaddr* address, socklen_t bytes,
                                                bool reuse);
// Where a TCP socket is bound.
[[nodiscard]] IpAddress bound_address(int socket);
// Listens for `transport`, "shm" or "tcp": under a random name, or on a free port of
// `bind_address`. Throws Error(disconnected) when the address cannot be bound.
[[nodiscard]] ListeningSocket listen_on_new_address(const std::string& transport,
                                                    const std::string& bind_address);

}  // namespace stitch::transport
