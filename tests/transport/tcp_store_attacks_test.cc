// Attacks on the TCP store without knowledge of its secret: between a client and the server, and as
// either of them.
#include <poll.h>

#include <future>

#include "stitch/base/byte_io.h"
#include "stitch/base/mutex.h"
#include "stitch/transport/store/tcp_store.h"
#include "stitch/transport/store/tcp_store_protocol.h"
#include "tests/support/plain_test.h"
#include "tests/transport/plain_socket.h"

namespace stitch::transport::tcp_store_attacks_test {
namespace {

using namespace std::chrono_literals;
using stitch::testing::error_of;

enum Way : std::size_t { to_server, to_client };

// A relay between a client and a server, for one connection at a time, that records the bytes.
class Relay {
 public:
  // Changes the bytes at `offset` of one direction; false: close both connections.
  using Meddle = std::function<bool(Way way, std::size_t offset, std::string& bytes)>;

  explicit Relay(std::uint16_t server) : server_(server), port_(listener_.bind()) {
    listener_.listen();
    thread_ = std::jthread([this] { run(); });
  }
  ~Relay() {
    ended_ = true;
    Socket().connect(port_);
  }
  [[nodiscard]] std::uint16_t port() const { return port_; }
  // Of the next connections. REQUIRES: none is open.
  void meddle(Meddle meddle) {
    const base::MutexLock lock(mutex_);
    meddle_ = std::move(meddle);
  }
  // The unchanged bytes of that direction of the last connection.
  [[nodiscard]] std::string said(Way way) {
    const base::MutexLock lock(mutex_);
    return said_[way];
  }

 private:
  void run() {
    while (!ended_) {
      Socket client = listener_.accept();
      if (ended_) return;
      Socket server;
      server.connect(server_);
      pump(client, server);
    }
  }
  void pump(Socket& client, Socket& server) {
    Meddle meddle;
    {
      const base::MutexLock lock(mutex_);
      meddle = meddle_;
      said_ = {};
    }
    const std::array<Socket*, 2> from{&client, &server};
    const std::array<Socket*, 2> to{&server, &client};
    for (;;) {
      std::array<pollfd, 2> ready{{{client.file(), POLLIN, 0}, {server.file(), POLLIN, 0}}};
      if (::poll(ready.data(), ready.size(), 30'000) <= 0) return;
      for (const Way way : {to_server, to_client}) {
        if (ready[way].revents == 0) continue;
        std::string bytes(65536, '\0');
        const ssize_t got = ::recv(from[way]->file(), bytes.data(), bytes.size(), 0);
        if (got <= 0) return;
        bytes.resize(static_cast<std::size_t>(got));
        std::size_t offset = 0;
        {
          const base::MutexLock lock(mutex_);
          offset = said_[way].size();
          said_[way] += bytes;
        }
        if (meddle && !meddle(way, offset, bytes)) {
          to[way]->send(bytes);
          return;
        }
        to[way]->send(bytes);
      }
    }
  }

  const std::uint16_t server_;
  Socket listener_;
  const std::uint16_t port_;
  std::atomic<bool> ended_ = false;
  base::Mutex mutex_;
  Meddle meddle_ STITCH_GUARDED_BY(mutex_);
  std::array<std::string, 2> said_ STITCH_GUARDED_BY(mutex_);
  std::jthread thread_;
};

class TcpStoreAttacks : public ::testing::Test {
 protected:
  [[nodiscard]] std::shared_ptr<Store> client(std::uint16_t port) {
    TcpStoreOptions options = options_;
    options.port = port;
    options.one_round = true;
    return make_tcp_store(loop_, options);
  }
  // A session over the relay; returns its error.
  std::optional<Error> session() {
    try {
      const auto store = client(relay_.port());
      store->set("key", "value");
      return std::nullopt;
    } catch (const Error& error) {
      return error;
    }
  }
  // Only the client's own requests may have had an effect.
  void expect_nothing_else() {
    const auto value = direct_->try_get("key");
    EXPECT_TRUE(!value || *value == "value") << *value;
    direct_->erase("key");
  }

  const TcpStoreOptions options_{.job = "job", .key = SecretKey::from_random("right")};
  base::EventLoop server_loop_{"store server"};
  base::EventLoop loop_{"store client"};
  TcpStoreServer server_{server_loop_, options_};
  Relay relay_{server_.port()};
  const std::shared_ptr<Store> direct_ = client(server_.port());
};

bool is_refusal(const Error& error) {
  return error.code() == ErrorCode::unauthenticated || error.code() == ErrorCode::protocol;
}

TEST_F(TcpStoreAttacks, AChangedByteIsNoticedWhereverItIs) {
  ASSERT_EQ(session(), std::nullopt);
  const std::array<std::size_t, 2> sizes{relay_.said(to_server).size(),
                                         relay_.said(to_client).size()};
  EXPECT_EQ(relay_.said(to_server).find("value"), std::string::npos) << "it is not encrypted";
  EXPECT_EQ(direct_->get("key", 0ms), "value");
  for (const Way way : {to_server, to_client}) {
    for (std::size_t at = 0; at < sizes[way]; ++at) {
      const char change = at % 3 == 0 ? '\1' : at % 3 == 1 ? '\x40' : '\xff';
      relay_.meddle([=](Way each, std::size_t offset, std::string& bytes) {
        if (each == way && at >= offset && at - offset < bytes.size())
          bytes[at - offset] = static_cast<char>(bytes[at - offset] ^ change);
        return true;
      });
      const auto error = session();
      ASSERT_TRUE(error.has_value())
          << "byte " << at << (way == to_server ? " to the server" : " to the client");
      EXPECT_TRUE(is_refusal(*error))
          << "byte " << at << (way == to_server ? " to the server: " : " to the client: ")
          << to_string(error->code()) << ": " << error->what();
      expect_nothing_else();
    }
  }
}

TEST_F(TcpStoreAttacks, ARecordedSessionCannotBeReplayed) {
  {
    const auto store = client(relay_.port());
    EXPECT_EQ(store->add("count", 1), 1);
  }
  const std::string to_the_server = relay_.said(to_server);
  const std::string to_the_client = relay_.said(to_client);
  // To the server: the recorded proof does not fit its fresh key.
  Socket client;
  client.connect(server_.port());
  client.send(to_the_server);
  client.receive(kStoreMagic.size());
  (void)decode_answer(bytes_of(client.receive_frame()), StoreHandshake::kHelloBytes);
  const auto refused = error_of(
      [&] { (void)decode_answer(bytes_of(client.receive_frame()), StoreHandshake::kProofBytes); });
  EXPECT_EQ(refused.code(), ErrorCode::unauthenticated);
  EXPECT_TRUE(client.hung_up());
  EXPECT_EQ(direct_->get("count", 0ms), "1");
  // To a client.
  Socket listener;
  const std::uint16_t port = listener.bind();
  listener.listen();
  std::jthread impostor([&] {
    Socket socket = listener.accept();
    socket.send(to_the_client);
    EXPECT_TRUE(socket.hung_up());
  });
  EXPECT_EQ(error_of([&] { (void)this->client(port); }).code(), ErrorCode::unauthenticated);
}

TEST_F(TcpStoreAttacks, HellosAndProofsOfTwoConnectionsCannotBeCrossed) {
  // Two connections to the server with one hello of a client.
  StoreHandshake honest(StoreHandshake::Role::client, options_.job, options_.key);
  std::array<Socket, 2> connections;
  std::array<std::string, 2> hellos;
  for (std::size_t i = 0; i < 2; ++i) {
    connections[i].connect(server_.port());
    connections[i].send(kStoreMagic);
    connections[i].send_frame(honest.hello());
    EXPECT_EQ(connections[i].receive(kStoreMagic.size()), kStoreMagic);
    hellos[i] = connections[i].receive_frame();
  }
  EXPECT_NE(hellos[0], hellos[1]);
  honest.take_hello(decode_answer(bytes_of(hellos[0]), StoreHandshake::kHelloBytes));
  connections[1].send_frame(honest.proof());
  EXPECT_EQ(
      error_of([&] { (void)decode_answer(bytes_of(connections[1].receive_frame()), 32); }).code(),
      ErrorCode::unauthenticated);
  // The server does not prove itself to a peer that reflects its hello.
  connections[0].send_frame(honest.proof());
  const std::string proof = connections[0].receive_frame();
  Socket mirror;
  mirror.connect(server_.port());
  mirror.send(kStoreMagic);
  base::Bytes hello;
  hello.append(hellos[0].data() + 1, StoreHandshake::kHelloBytes);
  mirror.send_frame(hello);
  mirror.receive(kStoreMagic.size());
  const auto error = error_of(
      [&] { (void)decode_answer(bytes_of(mirror.receive_frame()), StoreHandshake::kHelloBytes); });
  EXPECT_EQ(error.code(), ErrorCode::protocol);
  EXPECT_STREQ(error.what(), "it talks to clients of stores only");
}

// Answers a client with its own messages.
TEST_F(TcpStoreAttacks, AReflectedHelloIsRefused) {
  for (const bool plainly : {true, false}) {
    Socket listener;
    const std::uint16_t port = listener.bind();
    listener.listen();
    std::jthread mirror([&] {
      Socket socket = listener.accept();
      const std::string magic = socket.receive(kStoreMagic.size());
      const std::string hello = socket.receive_frame();
      socket.send(magic);
      if (plainly) {
        base::Bytes same;
        same.append(hello.data(), hello.size());
        socket.send_frame(same);
      } else {
        socket.send_frame(encode_answer(bytes_of(hello)));
      }
      EXPECT_TRUE(socket.hung_up());
    });
    const auto error = error_of([&] { (void)client(port); });
    EXPECT_EQ(error.code(), ErrorCode::protocol) << error.what();
  }
}

// A server without the secret whose hello is valid.
TEST_F(TcpStoreAttacks, AServerThatCannotProveTheSecretIsRefused) {
  Socket listener;
  const std::uint16_t port = listener.bind();
  listener.listen();
  std::jthread impostor([&] {
    Socket socket = listener.accept();
    socket.receive(kStoreMagic.size());
    StoreHandshake guess(StoreHandshake::Role::server, "job", SecretKey::from_random("guess"));
    guess.take_hello(bytes_of(socket.receive_frame()));
    socket.send(kStoreMagic);
    socket.send_frame(encode_answer(guess.hello().span()));
    EXPECT_EQ(socket.receive_frame().size(), StoreHandshake::kProofBytes);
    socket.send_frame(encode_answer(guess.proof().span()));
    EXPECT_TRUE(socket.hung_up());
  });
  const auto error = error_of([&] { (void)client(port); });
  EXPECT_EQ(error.code(), ErrorCode::unauthenticated);
  EXPECT_EQ(error.what(), "tcp store at 127.0.0.1:" + std::to_string(port) +
                              " refuses this client of job \"job\": the secrets differ");
}

TEST_F(TcpStoreAttacks, NothingIsReadFromAClientBeforeItsProof) {
  Socket socket;
  socket.connect(server_.port());
  socket.send(kStoreMagic);
  StoreHandshake wrong(StoreHandshake::Role::client, "job", SecretKey::from_random("wrong"));
  socket.send_frame(wrong.hello());
  base::Bytes set;
  base::ByteWriter writer(set);
  writer.write(std::uint64_t{1});
  writer.write(StoreOperation::set);
  writer.write_string("key");
  writer.write_string("mine");
  socket.send_frame(set);
  EXPECT_TRUE(socket.hung_up());
  EXPECT_EQ(direct_->try_get("key"), std::nullopt);
}

}  // namespace
}  // namespace stitch::transport::tcp_store_attacks_test
