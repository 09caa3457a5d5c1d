// From nothing to the first answer of a peer: connecting, proving that both sides know the secret,
// and one round trip of 64 bytes. Beside it TLS 1.3 of OpenSSL with a key known to both sides and
// an X25519 agreement (psk_dhe_ke): it proves the same.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <future>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>

#include "measure.h"
#include "stitch/transport/stream/stream_endpoint.h"
#include "timing.h"

namespace stitch_bench {

namespace connect_measure {
namespace {

using namespace stitch::transport;
using Ball = std::array<char, 64>;

// ---- stitch

constexpr std::uint32_t kClient = 0;
constexpr std::uint32_t kServer = 1;

EndpointOptions options_of(std::uint32_t id, bool secret) {
  EndpointOptions options;
  options.self.id = id;
  options.self.epoch = 1;
  options.self.name = "worker" + std::to_string(id);
  if (secret) options.secret = SecretKey::from_random(std::string(32, 's'));
  return options;
}

Message ball() {
  FrameBuilder frame(1);
  const Ball bytes{};
  frame.end_body();
  frame.add_section(1, std::as_bytes(std::span(bytes)));
  return std::move(frame).finish();
}

void serve_answers(const Side& side, bool secret) {
  const auto endpoint = make_stream_endpoint(options_of(kServer, secret), {{"tcp"}});
  const auto addresses = endpoint->listen([] {
    ConnectionEvents events;
    events.on_open = [](const auto&) {};
    events.on_message = [](const auto& connection, Message message) {
      connection->send(std::move(message), [](const auto&) {});
    };
    events.on_closed = [](const auto&, const auto&) {};
    return events;
  });
  side.send_line(addresses.front());
  side.meet();
}

// One connection: throws what ended it before the answer came.
void connect_once(Endpoint& endpoint, const std::string& address) {
  std::promise<void> answered;
  ConnectionEvents events;
  events.on_open = [](const auto& connection) { connection->send(ball(), [](const auto&) {}); };
  auto once = std::make_shared<bool>(false);
  events.on_message = [&answered, once](const auto&, Message) {
    *once = true;
    answered.set_value();
  };
  std::promise<void> closed;
  events.on_closed = [&answered, &closed, once](const auto&, const stitch::Error& error) {
    if (!*once) answered.set_exception(std::make_exception_ptr(stitch::Error(error)));
    closed.set_value();
  };
  const auto connection = endpoint.connect(address, {kServer, 1}, std::move(events));
  auto answer = answered.get_future();
  answer.wait();
  connection->close(stitch::Error(stitch::ErrorCode::disconnected, "the measure has its answer"));
  closed.get_future().wait();
  answer.get();
}

void time_connections(const Side& side, const std::string& key, bool secret) {
  const std::string address = side.receive_line();
  const auto endpoint = make_stream_endpoint(options_of(kClient, secret), {{"tcp"}});
  report_latency(
      side, key,
      time_each_us(side.settings().seconds, 20, [&] { connect_once(*endpoint, address); }),
      secret ? "floor.tls13" : "");
  side.meet();
}

// ---- OpenSSL

[[noreturn]] void throw_errno(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

struct Closed {
  void operator()(const int* socket) const {
    ::close(*socket);
    delete socket;
  }
};
using Socket = std::unique_ptr<int, Closed>;
Socket owned(int descriptor, const char* what) {
  if (descriptor < 0) throw_errno(what);
  return Socket(new int(descriptor));
}

struct Freed {
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
  void operator()(SSL* session) const { SSL_free(session); }
};
using Context = std::unique_ptr<SSL_CTX, Freed>;
using Tls = std::unique_ptr<SSL, Freed>;

unsigned int write_key(unsigned char* key, unsigned int bytes) {
  constexpr unsigned int kKeyBytes = 32;
  if (bytes < kKeyBytes) return 0;
  std::memset(key, 's', kKeyBytes);
  return kKeyBytes;
}

Context context_of(bool server) {
  Context context(SSL_CTX_new(server ? TLS_server_method() : TLS_client_method()));
  if (!context || SSL_CTX_set_min_proto_version(context.get(), TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_ciphersuites(context.get(), "TLS_AES_128_GCM_SHA256") != 1 ||
      SSL_CTX_set1_groups_list(context.get(), "X25519") != 1)
    throw std::runtime_error("OpenSSL has no TLS 1.3 with X25519");
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  static_cast<void>(SSL_CTX_set_num_tickets(context.get(), 0));
  if (server) {
    SSL_CTX_set_psk_server_callback(context.get(),
                                    [](SSL*, const char*, unsigned char* key, unsigned int bytes) {
                                      return write_key(key, bytes);
                                    });
  } else {
    SSL_CTX_set_psk_client_callback(
        context.get(), [](SSL*, const char*, char* identity, unsigned int identity_bytes,
                          unsigned char* key, unsigned int bytes) {
          std::strncpy(identity, "worker0", identity_bytes);
          return write_key(key, bytes);
        });
  }
  return context;
}

Tls session_over(const Context& context, const Socket& socket) {
  const int on = 1;
  if (::setsockopt(*socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) != 0)
    throw_errno("cannot set TCP_NODELAY");
  Tls session(SSL_new(context.get()));
  if (!session || SSL_set_fd(session.get(), *socket) != 1)
    throw std::runtime_error("OpenSSL makes no session");
  return session;
}

void serve_tls(const Side& side) {
  const Context context = context_of(true);
  const Socket listener = owned(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "no socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  if (::bind(*listener, reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      ::listen(*listener, 16) != 0 ||
      ::getsockname(*listener, reinterpret_cast<sockaddr*>(&address), &size) != 0)
    throw_errno("cannot listen");
  side.send_line(std::to_string(ntohs(address.sin_port)));
  // The client ends with a connection without a handshake.
  for (;;) {
    const Socket socket = owned(::accept4(*listener, nullptr, nullptr, SOCK_CLOEXEC), "no client");
    const Tls session = session_over(context, socket);
    if (SSL_accept(session.get()) != 1) return;
    Ball ball{};
    while (SSL_read(session.get(), ball.data(), static_cast<int>(ball.size())) > 0)
      SSL_write(session.get(), ball.data(), static_cast<int>(ball.size()));
  }
}

Socket connected_to(std::uint16_t port) {
  Socket socket = owned(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "no socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  if (::connect(*socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0)
    throw_errno("cannot connect");
  return socket;
}

void time_tls(const Side& side) {
  const Context context = context_of(false);
  const auto port = static_cast<std::uint16_t>(std::stoi(side.receive_line()));
  report_latency(side, "floor.tls13", time_each_us(side.settings().seconds, 20, [&] {
                   const Socket socket = connected_to(port);
                   const Tls session = session_over(context, socket);
                   Ball ball{};
                   const int size = static_cast<int>(ball.size());
                   if (SSL_connect(session.get()) != 1 ||
                       SSL_write(session.get(), ball.data(), size) != size ||
                       SSL_read(session.get(), ball.data(), size) != size)
                     throw std::runtime_error("no answer over TLS 1.3");
                 }));
  connected_to(port);
}

void first(Side& side) {
  time_tls(side);
  time_connections(side, "connect.tcp.secret", true);
  time_connections(side, "connect.tcp.plain", false);
}
void second(Side& side) {
  serve_tls(side);
  serve_answers(side, true);
  serve_answers(side, false);
}

}  // namespace
}  // namespace connect_measure

Measure connect() {
  using namespace connect_measure;
  return {.name = "connect",
          .about =
              "a new TCP connection until its first answer, with and without a secret; beside TLS "
              "1.3 of OpenSSL with a shared key",
          .first = &first,
          .second = &second};
}

}  // namespace stitch_bench
