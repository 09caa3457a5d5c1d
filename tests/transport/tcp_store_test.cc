// Behaviour of the TCP store only: connecting, foreign peers, secrets, limits, a server that dies.
// The rest is in store_contract_test; attacks on its handshake are those of transcript_attack_test.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>

#include "stitch/transport/store/store_address.h"
#include "stitch/transport/store/tcp_store.h"
#include "stitch/transport/store/tcp_store_protocol.h"
#include "stitch/transport/stream/stream_endpoint.h"
#include "tests/support/forked_child.h"
#include "tests/support/plain_test.h"
#include "tests/transport/plain_socket.h"
#include "tests/transport/recorder.h"

namespace stitch::transport::tcp_store_test {
namespace {

using namespace std::chrono_literals;
using stitch::testing::error_of;
using stitch::testing::eventually;
using stitch::testing::has_text;

int threads_here() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("Threads:")) return std::stoi(line.substr(8));
  }
  return -1;
}

std::shared_ptr<Store> client(TcpStoreOptions options, std::uint16_t port) {
  options.port = port;
  return make_tcp_store(options);
}
std::shared_ptr<Store> client(const TcpStoreServer& server) {
  return client({.connect_timeout = 20s}, server.port());
}
std::string at(std::uint16_t port) { return "tcp store at 127.0.0.1:" + std::to_string(port); }

// A client that sends what no client sends.
class RawClient {
 public:
  explicit RawClient(std::uint16_t port, std::uint32_t id = Hello::kStoreClientId) {
    EndpointOptions self;
    self.self.id = id;
    self.self.epoch = 1;
    self.self.name = "raw";
    endpoint_ = make_stream_endpoint(std::move(self), {{"tcp"}});
    connection_ = endpoint_->connect("tcp://127.0.0.1:" + std::to_string(port),
                                     {Hello::kStoreId, 1}, recorder_->events());
  }
  void send(Message message) {
    connection_->send(std::move(message), [](const std::optional<Error>&) {});
  }
  [[nodiscard]] Recorder& seen() { return *recorder_; }
  [[nodiscard]] Connection& connection() { return *connection_; }

 private:
  std::shared_ptr<Recorder> recorder_ = std::make_shared<Recorder>();
  std::unique_ptr<Endpoint> endpoint_;
  std::shared_ptr<Connection> connection_;
};

StoreRequest get_request(std::uint64_t number, const std::string& key) {
  return {.number = number, .operation = StoreOperation::get, .key = key};
}

TEST(TcpStore, AServerThatIsNotThereIsNamedWithTheCause) {
  Socket taken;
  const std::uint16_t port = taken.bind();  // bound, but not listening
  const auto error = error_of([&] { client({.connect_timeout = 200ms}, port); });
  EXPECT_TRUE(has_text(error, ErrorCode::disconnected,
                       at(port) +
                           " cannot be reached within 200 ms: connect to \"tcp://127.0.0.1:" +
                           std::to_string(port) + "\" failed: Connection refused"));
}

TEST(TcpStore, AHostThatCannotBeResolvedIsNamed) {
  const auto error =
      error_of([&] { client({.host = std::string(300, 'a'), .connect_timeout = 100ms}, 1); });
  EXPECT_TRUE(has_text(error, ErrorCode::disconnected, "aaa\" cannot be resolved: "));
  EXPECT_EQ(error_of([&] { client({}, 0); }).code(), ErrorCode::invalid_argument);
}

TEST(TcpStore, AClientWaitsForAServerThatStartsLater) {
  Socket taken;
  const std::uint16_t port = taken.bind();
  auto store = std::async(std::launch::async, [&] { return client({}, port); });
  EXPECT_EQ(store.wait_for(60ms), std::future_status::timeout);
  taken.close();
  TcpStoreServer server({.port = port});
  const auto connected = store.get();
  connected->set("k", "v");
  EXPECT_EQ(connected->describe(), at(port));
}

TEST(TcpStore, LocalhostIsBothLoopbackAddresses) {
  TcpStoreServer server({.host = "localhost"});
  const std::string port = std::to_string(server.port());
  std::vector<std::string> expected{"tcp://127.0.0.1:" + port};
  // Where this host has that address.
  if (listening_socket(reinterpret_cast<const sockaddr*>(&IpAddress::parse("::1", 0)->address),
                       sizeof(sockaddr_in6), false))
    expected.push_back("tcp://[::1]:" + port);
  EXPECT_EQ(server.addresses(), expected);
  client({.host = "localhost"}, server.port())->set("k", "v");
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto store = client({.host = i == 0 ? "127.0.0.1" : "::1"}, server.port());
    EXPECT_EQ(store->get("k", 1s), "v");
    EXPECT_EQ(store->describe(),
              "tcp store at " + std::string(i == 0 ? "127.0.0.1:" : "[::1]:") + port);
  }
  const auto error = error_of([&] { client({.host = "localhost", .one_round = true}, 1); });
  EXPECT_TRUE(has_text(error, ErrorCode::disconnected, "\"tcp://127.0.0.1:1\" failed: "));
  EXPECT_TRUE(has_text(error, ErrorCode::disconnected, "\"tcp://[::1]:1\" failed: "));
}

TEST(TcpStore, APortThatIsTakenIsNamed) {
  Socket foreign;
  const std::uint16_t port = foreign.bind();
  foreign.listen();
  for (const char* host : {"127.0.0.1", "localhost"}) {
    const auto error = error_of([&] { TcpStoreServer({.host = host, .port = port}); });
    EXPECT_EQ(error.code(), ErrorCode::disconnected);
    EXPECT_EQ(error.what(), "tcp store at " + std::string(host) + ':' + std::to_string(port) +
                                " cannot listen: address 127.0.0.1:" + std::to_string(port) +
                                " could not be bound: Address already in use");
  }
}

TEST(TcpStore, EveryCallFailsWhenTheServerDies) {
  auto server = std::make_unique<TcpStoreServer>(TcpStoreOptions{});
  const std::uint16_t port = server->port();
  const auto store = client({}, port);
  std::vector<std::future<Error>> errors;
  for (int i = 0; i < 8; ++i) {
    errors.push_back(std::async(std::launch::async, [&, i] {
      store->set("waiting/" + std::to_string(i), "");
      return error_of([&] { (void)store->get("never", 60s); });
    }));
  }
  for (int i = 0; i < 8; ++i) (void)store->get("waiting/" + std::to_string(i), 20s);
  server.reset();
  for (auto& future : errors) {
    const Error error = future.get();
    EXPECT_TRUE(has_text(error, ErrorCode::disconnected, at(port) + " is gone: "));
  }
  const auto later = error_of([&] { store->set("k", "v"); });
  EXPECT_TRUE(has_text(later, ErrorCode::disconnected, at(port) + " is gone: "));
  TcpStoreServer again({.port = port});  // the port is free immediately
  client({}, port)->set("k", "v");
}

TEST(TcpStore, AServerThatDoesNotAnswerTimesOut) {
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe(pipe.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    TcpStoreServer server(TcpStoreOptions{});
    const std::uint16_t port = server.port();
    if (::write(pipe[1], &port, sizeof(port)) != sizeof(port)) ::_exit(1);
    ::alarm(60);
    for (;;) ::pause();
  }
  std::uint16_t port = 0;
  ASSERT_EQ(::read(pipe[0], &port, sizeof(port)), static_cast<ssize_t>(sizeof(port)));
  const auto store = client({.connect_timeout = 300ms}, port);
  ASSERT_EQ(::kill(child, SIGSTOP), 0);
  ASSERT_EQ(::waitpid(child, nullptr, WUNTRACED), child);
  EXPECT_TRUE(has_text(error_of([&] { store->set("k", "v"); }), ErrorCode::timeout,
                       at(port) + " did not answer within "));
  EXPECT_TRUE(has_text(error_of([&] { (void)store->get("k", 10ms); }), ErrorCode::timeout,
                       at(port) + " did not answer within "));
  ASSERT_EQ(::kill(child, SIGCONT), 0);
  EXPECT_EQ(store->get("k", 30s), "v");
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  for (const int end : pipe) ::close(end);
}

std::shared_ptr<const SecretKey> key_of(std::string_view secret) {
  return secret.empty() ? nullptr : SecretKey::from_random(secret);
}

TEST(TcpStore, SecretsThatDifferAreRefusedAtOnce) {
  TcpStoreServer guarded({.key = key_of("right")});
  TcpStoreServer open(TcpStoreOptions{});
  const auto refused = [&](const char* secret, std::uint16_t port) {
    const auto began = std::chrono::steady_clock::now();
    const auto error = error_of([&] { client({.key = key_of(secret)}, port); });
    EXPECT_TRUE(has_text(error, ErrorCode::unauthenticated, at(port) + " refuses this client: "));
    EXPECT_LT(std::chrono::steady_clock::now() - began, 10s) << "it was tried again";
  };
  refused("wrong", guarded.port());
  refused("", guarded.port());
  refused("right", open.port());
  client({.key = key_of("right")}, guarded.port())->set("k", "v");
}

TEST(TcpStore, WorkersAndStoresDoNotTakeOneAnotherForTheirOwnKind) {
  TcpStoreServer server(TcpStoreOptions{});
  RawClient worker(server.port(), 7);
  ASSERT_TRUE(worker.seen().wait_closed());
  EXPECT_EQ(worker.seen().closed_code(), ErrorCode::protocol);

  EndpointOptions self;
  self.self.id = 3;
  self.self.epoch = 1;
  self.self.name = "worker3";
  const auto endpoint = make_stream_endpoint(self, {{"tcp"}});
  const std::string address = endpoint->listen([] { return ConnectionEvents{}; }).front();
  const auto port = IpAddress::parse_with_port(address.substr(6))->port();
  const auto error = error_of([&] { client({.connect_timeout = 300ms}, port); });
  EXPECT_TRUE(has_text(error, ErrorCode::disconnected, " is wanted, worker \"worker3\""));
}

TEST(TcpStore, AForeignListenerIsNoStore) {
  Socket foreign;
  const std::uint16_t port = foreign.bind();
  foreign.listen();
  std::jthread chatter([&] {
    Socket socket = foreign.accept();
    socket.send("HTTP/1.1 400 Bad Request\r\n\r\n");
    EXPECT_TRUE(socket.hung_up());
  });
  const auto error = error_of([&] { client({}, port); });
  EXPECT_TRUE(has_text(error, ErrorCode::protocol, at(port) + " cannot be used: "));
}

TEST(TcpStore, AMalformedMessageClosesOnlyItsOwnConnection) {
  TcpStoreServer server(TcpStoreOptions{});
  const auto good = client(server);
  good->set("k", "v");
  Socket stranger;
  stranger.connect(server.port());
  stranger.send("GET / HTTP/1.1\r\n\r\n");
  EXPECT_TRUE(stranger.hung_up());

  Message reply = encode(StoreReply{});
  Message unknown = encode(StoreRequest{.number = 1, .operation = StoreOperation{77}, .key = "k"});
  Message keyless = encode(StoreRequest{.number = 1, .operation = StoreOperation::set});
  Message endless = encode(get_request(1, std::string(Store::kMaxKeyBytes + 1, 'k')));
  for (Message* each : {&reply, &unknown, &keyless, &endless}) {
    RawClient bad(server.port());
    bad.send(std::move(*each));
    ASSERT_TRUE(bad.seen().wait_closed());
  }
  EXPECT_EQ(good->get("k", 10s), "v");
}

TEST(TcpStore, WaitsNeedNoThread) {
  TcpStoreServer server(TcpStoreOptions{});
  const auto store = client(server);
  RawClient waiter(server.port());
  waiter.send(encode(get_request(1000, "later")));
  ASSERT_TRUE(waiter.seen().wait_open());
  const int before = threads_here();
  for (std::uint64_t number = 0; number < 60; ++number)
    waiter.send(encode(get_request(number, "later")));
  waiter.send(encode(
      StoreRequest{.number = 1001, .operation = StoreOperation::stop_waiting, .count = 1000}));
  EXPECT_TRUE(eventually([&] { return waiter.seen().received() == 1U; }));  // so the others wait
  EXPECT_LE(threads_here(), before);  // fewer when one of an earlier test has ended meanwhile
  store->set("later", "here");
  EXPECT_TRUE(eventually([&] { return waiter.seen().received() == 61U; }));
}

TEST(TcpStore, AClientThatDoesNotReadItsRepliesStopsOnlyItself) {
  TcpStoreServer server(TcpStoreOptions{});
  const auto store = client(server);
  store->set("large", std::string(std::size_t{1} << 20, 'x'));
  RawClient greedy(server.port());
  ASSERT_TRUE(greedy.seen().wait_open());
  greedy.connection().pause_reading(true);
  constexpr std::uint64_t kGets = 200;
  for (std::uint64_t number = 0; number < kGets; ++number)
    greedy.send(encode(get_request(number, "large")));
  store->set("k", "v");
  EXPECT_EQ(store->get("k", 30s), "v");
  greedy.connection().pause_reading(false);
  EXPECT_TRUE(eventually([&] { return greedy.seen().received() == kGets; }));
}

TEST(TcpStore, ValuesClaimsAndWaitsHaveABudget) {
  TcpStoreServer server({.max_bytes = 100'000});
  const auto store = client(server);
  const std::string large(60'000, 'x');
  store->set("a", large);
  store->set("a", large);  // instead of the other one
  EXPECT_TRUE(has_text(error_of([&] { store->set("b", large); }), ErrorCode::overloaded,
                       "the limit is 100000 in tcp store at 127.0.0.1:"));
  EXPECT_EQ(error_of([&] { (void)store->claim("b", large); }).code(), ErrorCode::overloaded);
  EXPECT_TRUE(store->claims("", 1, 0ms).empty());
  EXPECT_EQ(store->try_get("b"), std::nullopt);
  EXPECT_EQ(store->try_get("a"), large);
  EXPECT_TRUE(store->erase("a"));
  for (int i = 0; i < 10; ++i) {
    EXPECT_NE(store->claim("b" + std::to_string(i), large).claim, nullptr);
    EXPECT_EQ(error_of([&] { (void)store->get("never", 0ms); }).code(), ErrorCode::timeout);
  }
  store->set("b", large);

  RawClient greedy(server.port());
  for (std::uint64_t number = 0; number < 60; ++number)
    greedy.send(encode(get_request(number, std::string(1000, 'k'))));
  EXPECT_TRUE(eventually([&] { return greedy.seen().received() > 0; }));  // `overloaded`
  const std::string small(2000, 'x');
  EXPECT_EQ(error_of([&] { store->set("c", small); }).code(), ErrorCode::overloaded);
  greedy.connection().close(Error(ErrorCode::disconnected, "the test ends it"));
  EXPECT_TRUE(eventually([&] {
    try {
      store->set("c", small);
      return true;
    } catch (const Error&) {
      return false;
    }
  }));
}

TEST(TcpStore, AClientHasItsShareOfClaimsAndWaits) {
  TcpStoreServer server(TcpStoreOptions{});
  const auto store = client(server);
  RawClient greedy(server.port());
  std::uint64_t number = 0;
  for (; number < 65; ++number) greedy.send(encode(get_request(number, "never")));
  EXPECT_TRUE(eventually([&] { return greedy.seen().received() == 1; }));  // `overloaded`
  for (; number < 65 + 65; ++number)
    greedy.send(encode(StoreRequest{.number = number,
                                    .operation = StoreOperation::claim,
                                    .key = "a/" + std::to_string(number)}));
  EXPECT_TRUE(eventually([&] { return greedy.seen().received() == 1 + 65; }));
  EXPECT_EQ(store->claims("a/", 0, 0ms).size(), 64U);
  EXPECT_NE(store->claim("a/mine", "").claim, nullptr);
}

TEST(TcpStore, ClientsAreCounted) {
  TcpStoreServer server({.max_clients = 2});
  const auto first = client(server);
  auto second = client(server);
  const auto error = error_of([&] { (void)client({.connect_timeout = 100ms}, server.port()); });
  EXPECT_TRUE(has_text(error, ErrorCode::overloaded, "the store has 2 clients already"));
  second.reset();
  const auto third = client(server);  // the server notices a moment later
  third->set("k", "v");
  EXPECT_EQ(first->get("k", 10s), "v");
}

TEST(TcpStore, UnauthenticatedConnectionsCannotKeepClientsOut) {
  TcpStoreServer server({.key = key_of("right")});
  std::vector<Socket> strangers(600);
  for (Socket& stranger : strangers) stranger.connect(server.port());
  const auto store = client({.key = key_of("right")}, server.port());
  store->set("k", "v");
  EXPECT_EQ(store->get("k", 10s), "v");
}

}  // namespace
}  // namespace stitch::transport::tcp_store_test
