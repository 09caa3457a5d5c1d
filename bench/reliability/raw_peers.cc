#include "raw_peers.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string>

namespace stitch_reliability {

RawPeers::~RawPeers() {
  for (const int socket : sockets_) ::close(socket);
}

std::size_t RawPeers::keep(std::size_t wanted) {
  std::erase_if(sockets_, [this](int socket) {
    char byte = 0;
    const ssize_t got = ::recv(socket, &byte, 1, MSG_DONTWAIT | MSG_PEEK);
    if (got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR))) return false;
    ::close(socket);
    ++closed_;
    return true;
  });
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port_);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  while (sockets_.size() < wanted) {
    const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (socket < 0) break;
    if (::connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 &&
        errno != EINPROGRESS) {
      ::close(socket);
      break;
    }
    sockets_.push_back(socket);
  }
  return sockets_.size();
}

std::vector<std::uint16_t> listening_ports() {
  std::vector<std::uint16_t> ports;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int socket = std::stoi(entry.path().filename().string());
    int listens = 0;
    socklen_t bytes = sizeof(listens);
    if (::getsockopt(socket, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) != 0 || listens == 0)
      continue;
    sockaddr_in address{};
    bytes = sizeof(address);
    if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &bytes) == 0 &&
        address.sin_family == AF_INET) {
      ports.push_back(ntohs(address.sin_port));
    }
  }
  return ports;
}

}  // namespace stitch_reliability
