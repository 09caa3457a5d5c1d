// Round trips of 64 bytes between two processes over plain sockets: the kernel's share of the time.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "cores.h"
#include "measure.h"
#include "timing.h"

namespace stitch_bench {

namespace floors_sockets_measure {
namespace {

using Ball = std::array<char, 64>;

[[noreturn]] void throw_errno(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

void check(int result, const char* what) {
  if (result < 0) throw_errno(what);
}

class Socket {
 public:
  explicit Socket(int descriptor) : descriptor_(descriptor) {
    check(descriptor, "cannot make a socket");
  }
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&&) = delete;
  ~Socket() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  [[nodiscard]] int descriptor() const { return descriptor_; }

  void send(const Ball& ball) const {
    std::size_t done = 0;
    while (done < ball.size()) {
      const ssize_t sent =
          ::send(descriptor_, ball.data() + done, ball.size() - done, MSG_NOSIGNAL);
      if (sent >= 0) {
        done += static_cast<std::size_t>(sent);
      } else if (errno != EINTR) {
        throw_errno("cannot send");
      }
    }
  }
  // False when the other side has closed. `polling`: busy-polls instead of sleeping, for at most
  // ten seconds.
  [[nodiscard]] bool receive(Ball& ball, bool polling) const {
    std::size_t done = 0;
    for (std::uint64_t tries = 0; done < ball.size();) {
      const ssize_t got =
          ::recv(descriptor_, ball.data() + done, ball.size() - done, polling ? MSG_DONTWAIT : 0);
      if (got > 0) {
        done += static_cast<std::size_t>(got);
      } else if (got == 0) {
        return false;
      } else if (errno != EINTR && !(polling && errno == EAGAIN)) {
        throw_errno("cannot receive");
      } else if (++tries > 20'000'000) {
        throw std::runtime_error("the other side of a polled socket is silent");
      }
    }
    return true;
  }

 private:
  int descriptor_;
};

// Rank 1 listens and sends its address, rank 0 connects: over TCP on 127.0.0.1, or over an abstract
// Unix socket.
sockaddr_storage any_address(int family, socklen_t& size) {
  sockaddr_storage storage{};
  if (family == AF_UNIX) {
    storage.ss_family = AF_UNIX;
    size = sizeof(sa_family_t);  // the kernel chooses a name
  } else {
    auto& address = reinterpret_cast<sockaddr_in&>(storage);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    size = sizeof(address);
  }
  return storage;
}
void set_no_delay(const Socket& socket, int family) {
  const int on = 1;
  if (family != AF_INET) return;
  check(::setsockopt(socket.descriptor(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)),
        "cannot set TCP_NODELAY");
}
Socket connect_to(const Side& side, int family) {
  Socket socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  // The address is sent as the numbers of its bytes.
  sockaddr_storage address{};
  socklen_t size = 0;
  std::istringstream numbers(side.receive_line());
  for (unsigned number = 0; size < sizeof(address) && numbers >> number;)
    reinterpret_cast<unsigned char*>(&address)[size++] = static_cast<unsigned char>(number);
  check(::connect(socket.descriptor(), reinterpret_cast<const sockaddr*>(&address), size),
        "cannot connect");
  set_no_delay(socket, family);
  return socket;
}
Socket accept_from(const Side& side, int family) {
  const Socket listener(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  socklen_t size = 0;
  sockaddr_storage address = any_address(family, size);
  check(::bind(listener.descriptor(), reinterpret_cast<const sockaddr*>(&address), size),
        "cannot bind");
  check(::listen(listener.descriptor(), 1), "cannot listen");
  size = sizeof(address);
  check(::getsockname(listener.descriptor(), reinterpret_cast<sockaddr*>(&address), &size),
        "cannot read an address");
  std::string numbers;
  for (socklen_t i = 0; i < size; ++i)
    numbers += std::to_string(reinterpret_cast<unsigned char*>(&address)[i]) + ' ';
  side.send_line(numbers);
  Socket socket(::accept4(listener.descriptor(), nullptr, nullptr, SOCK_CLOEXEC));
  set_no_delay(socket, family);
  return socket;
}

void throw_ball(const Side& side, const std::string& key, const Socket& socket, bool polling) {
  Ball ball{};
  report_latency(side, key, time_each_us(side.settings().seconds, 20, [&] {
                   socket.send(ball);
                   if (!socket.receive(ball, polling))
                     throw std::runtime_error("the other side has closed its socket");
                 }));
}
void return_ball(const Socket& socket, bool polling) {
  Ball ball{};
  while (socket.receive(ball, polling)) socket.send(ball);
}

void first(Side& side) {
  throw_ball(side, "floor.tcp.rtt64", connect_to(side, AF_INET), false);
  throw_ball(side, "floor.unix.rtt64", connect_to(side, AF_UNIX), false);
  if (!side.settings().pin && !has_two_cores()) return;
  pin_to_core(0);
  throw_ball(side, "floor.tcp_polling.rtt64", connect_to(side, AF_INET), true);
}
void second(Side& side) {
  return_ball(accept_from(side, AF_INET), false);
  return_ball(accept_from(side, AF_UNIX), false);
  if (!side.settings().pin && !has_two_cores()) return;
  pin_to_core(1);
  return_ball(accept_from(side, AF_INET), true);
}

}  // namespace
}  // namespace floors_sockets_measure

Measure floor_sockets() {
  using namespace floors_sockets_measure;
  return {.name = "floor-sockets",
          .about =
              "64 bytes back and forth: blocking TCP, TCP with both sides polling, blocking unix "
              "socket",
          .first = &first,
          .second = &second};
}

}  // namespace stitch_bench
