#include "stitch/transport/stream/socket_address.h"

#include <netinet/in.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "stitch/base/errno_text.h"
#include "stitch/base/error.h"
#include "stitch/base/random.h"

namespace stitch::transport {

namespace {

// Connections that the kernel keeps until they are accepted: a whole cluster may connect in one
// moment.
constexpr int kBacklog = 1024;

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

base::Descriptor listening_socket(const sockaddr* address, socklen_t bytes, bool reuse) {
  base::Descriptor socket(
      ::socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const auto allow_reuse = [&] {
    const int on = 1;
    return ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0;
  };
  // Another process may be about to listen at a port that is chosen here: only afterwards then.
  const bool chosen_here = reinterpret_cast<const sockaddr_in*>(address)->sin_port == 0;
  if (!socket || (reuse && !chosen_here && !allow_reuse()) ||
      ::bind(socket.get(), address, bytes) != 0 || (reuse && chosen_here && !allow_reuse()) ||
      ::listen(socket.get(), kBacklog) != 0) {
    const int error = errno;
    socket = {};
    errno = error;
  }
  return socket;
}

IpAddress bound_address(int socket) {
  IpAddress bound;
  bound.bytes = sizeof(bound.address);
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&bound.address), &bound.bytes);
  return bound;
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
  base::Descriptor socket = listening_socket(address.get(), address.bytes, false);
  if (!socket) {
    const int error = errno;
    throw Error(ErrorCode::disconnected,
                "address " + text + " could not be bound: " + base::errno_text(error));
  }
  if (transport == "tcp") text = "tcp://" + bound_address(socket.get()).text();
  return {std::move(socket), std::move(text)};
}

}  // namespace stitch::transport
