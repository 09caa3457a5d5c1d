#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <string>

#include "stitch/base/descriptor.h"
#include "stitch/base/event_loop.h"
#include "stitch/transport/store/store_handshake.h"
#include "stitch/transport/store/tcp_store.h"
#include "stitch/transport/store/tcp_store_protocol.h"
#include "tests/fuzz/targets.h"

namespace stitch::fuzz {
namespace {

using transport::StoreHandshake;
using transport::StoreOperation;

struct Server {
  Server() : loop("fuzz-store"), server(loop, options()) {}
  static transport::TcpStoreOptions options() {
    transport::TcpStoreOptions chosen;
    chosen.max_bytes = std::size_t{1} << 20;
    return chosen;
  }
  base::EventLoop loop;
  transport::TcpStoreServer server;
};

void send_all(int socket, Bytes bytes) {
  while (!bytes.empty()) {
    const auto sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return;
    bytes = bytes.subspan(static_cast<std::size_t>(sent));
  }
}

base::Bytes framed(const base::Bytes& content) {
  base::Bytes frame;
  base::ByteWriter out(frame);
  out.write(static_cast<std::uint32_t>(content.size()));
  out.write_bytes({content.data(), content.size()});
  return frame;
}

// A client of a server without a secret. The input: whether it introduces itself properly, then
// what it sends. Accepted: the server answers more than the introduction, and with no refusal.
bool run(Bytes input) {
  static Server server;
  static const std::string_view kMagic = "stitchst";
  Choices choices(input);
  const bool proper = (choices.byte() & 1) == 0;
  const base::Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(server.server.port());
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0)
    return false;
  if (proper) {
    static const StoreHandshake hello(StoreHandshake::Role::client, "", nullptr);
    static const base::Bytes introduction = framed(hello.hello());
    send_all(socket.get(), std::as_bytes(std::span(kMagic)));
    send_all(socket.get(), {introduction.data(), introduction.size()});
  }
  send_all(socket.get(), choices.rest());
  ::shutdown(socket.get(), SHUT_WR);
  std::array<char, 4096> answer;
  std::size_t received = 0;
  for (;;) {
    const auto bytes = ::recv(socket.get(), answer.data(), answer.size(), 0);
    if (bytes <= 0) break;
    received += static_cast<std::size_t>(bytes);
  }
  return received > kMagic.size() + 4 + StoreHandshake::kAnswerBytes;
}

std::vector<base::Bytes> seeds() {
  base::Bytes seed;
  base::ByteWriter out(seed);
  out.write(std::uint8_t{0});
  std::uint64_t id = 1;
  const auto request = [&](StoreOperation operation, const auto& write_arguments) {
    base::Bytes content;
    base::ByteWriter arguments(content);
    arguments.write(id++);
    arguments.write(operation);
    write_arguments(arguments);
    const base::Bytes frame = framed(content);
    out.write_bytes({frame.data(), frame.size()});
  };
  using Writer = base::ByteWriter;
  request(StoreOperation::set, [](Writer& to) {
    to.write_string("key");
    to.write_string("value");
  });
  request(StoreOperation::try_get, [](Writer& to) { to.write_string("key"); });
  request(StoreOperation::get, [](Writer& to) {
    to.write_string("key");
    to.write(std::int64_t{10});
  });
  request(StoreOperation::add, [](Writer& to) {
    to.write_string("count");
    to.write(std::int64_t{2});
  });
  request(StoreOperation::compare_and_set, [](Writer& to) {
    to.write_string("key");
    to.write(std::uint8_t{1});
    to.write_string("value");
    to.write_string("other");
  });
  request(StoreOperation::wait, [](Writer& to) {
    to.write(std::uint32_t{2});
    to.write_string("key");
    to.write_string("count");
    to.write(std::int64_t{10});
  });
  request(StoreOperation::erase, [](Writer& to) { to.write_string("key"); });
  std::vector<base::Bytes> list;
  list.push_back(std::move(seed));
  return list;
}

}  // namespace

// The server's own memory is within its limit, and a connection has buffers of libuv's.
const Target store{"store", run, seeds, 64, std::size_t{8} << 20};

}  // namespace stitch::fuzz
