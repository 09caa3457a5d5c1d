#include "stitch/transport/stream/tcp_link.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "stitch/transport/ip_address.h"

namespace stitch::transport {

namespace {

// Bytes of a large transfer that are given to the kernel in one piece: about 50 % faster than
// pieces of half that size.
constexpr std::size_t kMaxBulkBytes = std::size_t{512} << 10;
// The same while small messages are about, which wait behind the piece.
constexpr std::size_t kMaxBulkBytesBesideSmall = std::size_t{128} << 10;
// What the kernel may keep that it has not sent yet. Heartbeats wait behind it: on a slow network,
// the megabytes that it would take by default last longer than a peer may be silent.
constexpr int kUnsentBytes = 512 << 10;

class TcpLink final : public Link {
 public:
  explicit TcpLink(base::Descriptor socket) : socket_(std::move(socket)) {
    const int flags = fcntl(socket_.get(), F_GETFL, 0);
    fcntl(socket_.get(), F_SETFL, flags | O_NONBLOCK);
    const int on = 1;
    setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    setsockopt(socket_.get(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsentBytes, sizeof(kUnsentBytes));
  }

  int descriptor() const noexcept override { return socket_.get(); }
  bool cheap() const noexcept override { return false; }
  bool within_host() const noexcept override {
    IpAddress here, there;
    here.bytes = there.bytes = sizeof(sockaddr_storage);
    return getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&here.address), &here.bytes) ==
               0 &&
           getpeername(socket_.get(), reinterpret_cast<sockaddr*>(&there.address), &there.bytes) ==
               0 &&
           here.is_loopback() && there.is_loopback();
  }

  std::size_t read(std::span<const iovec> parts) override {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts.data());
    message.msg_iovlen = parts.size();
    for (;;) {
      const ssize_t count = recvmsg(socket_.get(), &message, MSG_DONTWAIT);
      if (count > 0) return static_cast<std::size_t>(count);
      if (count == 0) {
        end(0);
      } else if (errno == EINTR) {
        continue;
      } else if (errno != EAGAIN && errno != EWOULDBLOCK) {
        end(errno);
      }
      return 0;
    }
  }

  std::size_t write(std::span<const iovec> parts) override {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts.data());
    message.msg_iovlen = parts.size();
    for (;;) {
      const ssize_t count = sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (count >= 0) return static_cast<std::size_t>(count);
      // The reader sees the end of a broken stream, too, and ends the connection; but the kernel
      // reports the reason only once, which was here.
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EPIPE) write_errno_.store(errno);
      return 0;
    }
  }

  std::size_t bulk_room(bool few) override {
    return few ? kMaxBulkBytesBesideSmall : kMaxBulkBytes;
  }
  bool await_room() override { return true; }

  std::optional<Error> ended() override {
    if (!ended_) return std::nullopt;
    const int error = errno_ != 0 ? errno_ : write_errno_.load();
    return Error(ErrorCode::disconnected,
                 error == 0 ? "the peer closed the connection" : std::strerror(error));
  }

  void close() noexcept override { ::shutdown(socket_.get(), SHUT_RDWR); }

 private:
  void end(int error) noexcept {
    if (ended_) return;
    ended_ = true;
    errno_ = error;
  }
  const base::Descriptor socket_;
  bool ended_ = false;
  int errno_ = 0;
  std::atomic<int> write_errno_{0};  // of sendmsg(), by the thread that writes
};

}  // namespace

bool connects_itself(int socket) {
  sockaddr_storage self{};
  sockaddr_storage peer{};
  socklen_t self_bytes = sizeof(self);
  socklen_t peer_bytes = sizeof(peer);
  return ::getsockname(socket, reinterpret_cast<sockaddr*>(&self), &self_bytes) == 0 &&
         ::getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &peer_bytes) == 0 &&
         self_bytes == peer_bytes && std::memcmp(&self, &peer, self_bytes) == 0;
}

std::unique_ptr<Link> make_tcp_link(base::Descriptor socket) {
  return std::make_unique<TcpLink>(std::move(socket));
}

}  // namespace stitch::transport
