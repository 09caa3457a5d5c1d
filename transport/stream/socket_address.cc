#include "stitch/transport/stream/socket_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/un.h>

#include <cstring>

namespace stitch::transport {

SocketAddress abstract_address(const std::string& name) {
  SocketAddress address;
  auto* unix_address = reinterpret_cast<sockaddr_un*>(&address.storage);
  unix_address->sun_family = AF_UNIX;
  std::memcpy(unix_address->sun_path + 1, name.data(), name.size());
  address.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

std::string bound_tcp_address(int socket) {
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

}  // namespace stitch::transport
