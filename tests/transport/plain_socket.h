#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

namespace stitch::transport {

// A plain TCP socket, for foreign peers. Reads time out
// after 30 s.
class Socket {
 public:
  Socket() : file_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    ::setsockopt(file_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    const timeval limit{30, 0};
    ::setsockopt(file_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  }
  explicit Socket(int file) : file_(file) {}
  Socket(Socket&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
  ~Socket() {
    if (file_ >= 0) ::close(file_);
  }

  // Binds a free port of 127.0.0.1.
  std::uint16_t bind() {
    sockaddr_in address = loopback(0);
    EXPECT_EQ(::bind(file_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    socklen_t length = sizeof(address);
    ::getsockname(file_, reinterpret_cast<sockaddr*>(&address), &length);
    return ntohs(address.sin_port);
  }
  void listen() { EXPECT_EQ(::listen(file_, 16), 0); }
  Socket accept() { return Socket(::accept(file_, nullptr, nullptr)); }
  void connect(std::uint16_t port) {
    const sockaddr_in address = loopback(port);
    EXPECT_EQ(::connect(file_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  }
  void send(std::string_view bytes) {
    (void)!::send(file_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  // Exactly `bytes`, or fewer when the other side closes the connection.
  std::string receive(std::size_t bytes) {
    std::string text(bytes, '\0');
    std::size_t got = 0;
    while (got < bytes) {
      const ssize_t more = ::recv(file_, text.data() + got, bytes - got, 0);
      if (more <= 0) break;
      got += static_cast<std::size_t>(more);
    }
    text.resize(got);
    return text;
  }
  // True when the other side has closed the connection; drops the bytes before that.
  bool hung_up() {
    std::string rest(65536, '\0');
    ssize_t got = 0;
    while ((got = ::recv(file_, rest.data(), rest.size(), 0)) > 0) {
    }
    return got == 0 || errno == ECONNRESET;
  }
  void close() { ::close(std::exchange(file_, -1)); }
  [[nodiscard]] int file() const { return file_; }

 private:
  static sockaddr_in loopback(std::uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    return address;
  }
  int file_;
};

}  // namespace stitch::transport
