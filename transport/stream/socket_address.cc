#include "stitch/transport/stream/socket_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "stitch/base/errno_text.h"
#include "stitch/base/error.h"
#include "stitch/base/random.h"
#include "stitch/transport/ip_address.h"

namespace stitch::transport {

namespace {

// Connections that the kernel keeps until they are accepted: a whole cluster may connect in one
// moment.
constexpr int kBacklog = 1024;

// "127.0.0.1:4711" or "[::1]:4711".
[[nodiscard]] std::string bound_tcp_address(int socket) {
  SocketAddress bound;
  bound.bytes = sizeof(bound.storage);
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&bound.storage), &bound.bytes);
  char text[INET6_ADDRSTRLEN] = {};
  if (bound.storage.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(bound.storage);
    inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof(text));
    return std::string("[") + text + "]:" + std::to_string(ntohs(v6.sin6_port));
  }
  const auto& v4 = reinterpret_cast<const sockaddr_in&>(bound.storage);
  inet_ntop(AF_INET, &v4.sin_addr, text, sizeof(text));
  return std::string(text) + ':' + std::to_string(ntohs(v4.sin_port));
}

}  // namespace

Error socket_error(int error) {
  switch (error) {
    case EMFILE:
    case ENFILE:
    case ENOBUFS:
    case ENOMEM:
      return Error(ErrorCode::overloaded, base::errno_text(error));
    default:
      return Error(ErrorCode::disconnected, base::errno_text(error));
  }
}

SocketAddress abstract_address(const std::string& name) {
  SocketAddress address;
  auto* unix_address = reinterpret_cast<sockaddr_un*>(&address.storage);
  unix_address->sun_family = AF_UNIX;
  std::memcpy(unix_address->sun_path + 1, name.data(), name.size());
  address.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

ListeningSocket listen_on_new_address(const std::string& transport,
                                      const std::string& bind_address) {
  SocketAddress address;
  std::string text;
  if (transport == "shm") {
    const std::string name =
        "stitch-" + std::to_string(::getpid()) + '-' + std::to_string(base::random_number());
    address = abstract_address(name);
    text = "shm://" + name;
  } else {
    const auto ip = IpAddress::parse(bind_address, 0);
    address = {ip->address, ip->bytes};
    text = "tcp://" + bind_address;
  }
  base::Descriptor socket(
      ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket || ::bind(socket.get(), address.get(), address.bytes) != 0 ||
      ::listen(socket.get(), kBacklog) != 0) {
    const int error = errno;
    throw Error(ErrorCode::disconnected,
                "address " + text + " could not be bound: " + base::errno_text(error));
  }
  if (transport == "tcp") text = "tcp://" + bound_tcp_address(socket.get());
  return {std::move(socket), std::move(text)};
}

}  // namespace stitch::transport
