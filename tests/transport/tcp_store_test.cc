// Behaviour of the TCP store only: connecting, foreign peers, secrets, a server that dies. The rest
// is in store_contract_test.
#include <future>

#include "stitch/base/byte_io.h"
#include "stitch/transport/store/tcp_store.h"
#include "stitch/transport/store/tcp_store_protocol.h"
#include "tests/support/plain_test.h"
#include "tests/transport/plain_socket.h"

namespace stitch::transport::tcp_store_test {
namespace {

using namespace std::chrono_literals;
using stitch::testing::error_of;

base::Bytes request(std::uint64_t id, StoreOperation operation, std::string_view key) {
  base::Bytes bytes;
  base::ByteWriter writer(bytes);
  writer.write(id);
  writer.write(operation);
  writer.write_string(key);
  return bytes;
}

base::Bytes get_request(std::uint64_t id, std::string_view key, std::chrono::milliseconds timeout) {
  base::Bytes bytes = request(id, StoreOperation::get, key);
  base::ByteWriter(bytes).write(static_cast<std::int64_t>(timeout.count()));
  return bytes;
}

int threads_here() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("Threads:")) return std::stoi(line.substr(8));
  }
  return -1;
}

class TcpStoreTest : public ::testing::Test {
 protected:
  std::shared_ptr<Store> client(TcpStoreOptions options, std::uint16_t port) {
    options.port = port;
    return make_tcp_store(loop_, options);
  }
  static std::string at(std::uint16_t port) {
    return "tcp store at 127.0.0.1:" + std::to_string(port);
  }

  base::EventLoop server_loop_{"store server"};
  base::EventLoop loop_{"store client"};
};

TEST_F(TcpStoreTest, AServerThatIsNotThereIsNamedWithTheCause) {
  Socket taken;
  const std::uint16_t port = taken.bind();  // bound, but not listening
  const auto error = error_of([&] { client({.connect_timeout = 200ms}, port); });
  EXPECT_EQ(error.code(), ErrorCode::disconnected);
  EXPECT_EQ(error.what(), at(port) + " cannot be reached within 200 ms: connection refused");
}

TEST_F(TcpStoreTest, AHostThatCannotBeResolvedIsNamed) {
  const auto error =
      error_of([&] { client({.host = std::string(300, 'a'), .connect_timeout = 100ms}, 1); });
  EXPECT_EQ(error.code(), ErrorCode::disconnected);
  EXPECT_NE(std::string(error.what()).find("aaa\" cannot be resolved: "), std::string::npos)
      << error.what();
  EXPECT_EQ(error_of([&] { client({}, 0); }).code(), ErrorCode::invalid_argument);
}

TEST_F(TcpStoreTest, AClientWaitsForAServerThatStartsLater) {
  Socket taken;
  const std::uint16_t port = taken.bind();
  auto store = std::async(std::launch::async, [&] { return client({}, port); });
  EXPECT_EQ(store.wait_for(60ms), std::future_status::timeout);
  taken.close();
  TcpStoreServer server(server_loop_, {.port = port});
  const auto connected = store.get();
  connected->set("k", "v");
  EXPECT_EQ(connected->describe(), at(port));
}

TEST_F(TcpStoreTest, ANameIsResolved) {
  TcpStoreServer server(server_loop_, {.host = "localhost"});
  const auto store = client({.host = "localhost"}, server.port());
  store->set("k", "v");
  EXPECT_EQ(store->get("k", 1s), "v");
  EXPECT_EQ(store->describe(), "tcp store at localhost:" + std::to_string(server.port()));
}

TEST_F(TcpStoreTest, EveryCallFailsWhenTheServerDies) {
  auto server = std::make_unique<TcpStoreServer>(server_loop_, TcpStoreOptions{});
  const std::uint16_t port = server->port();
  const auto store = client({}, port);
  std::vector<std::future<Error>> errors;
  for (int i = 0; i < 8; ++i) {
    errors.push_back(std::async(std::launch::async, [&] {
      return error_of([&] {
        store->add("waiting", 1);
        (void)store->get("never", 60s);
      });
    }));
  }
  while (store->add("waiting", 0) < 8) std::this_thread::yield();
  server.reset();
  for (auto& future : errors) {
    const Error error = future.get();
    EXPECT_EQ(error.code(), ErrorCode::disconnected);
    EXPECT_TRUE(std::string(error.what()).starts_with(at(port) + " is gone: ")) << error.what();
  }
  const auto later = error_of([&] { store->set("k", "v"); });
  EXPECT_EQ(later.code(), ErrorCode::disconnected);
  EXPECT_TRUE(std::string(later.what()).starts_with(at(port) + " is gone: ")) << later.what();
  TcpStoreServer again(server_loop_, {.port = port});  // the port is free immediately
  client({}, port)->set("k", "v");
}

TEST_F(TcpStoreTest, AServerThatDoesNotAnswerTimesOut) {
  TcpStoreServer server(server_loop_, {});
  const auto store = client({.connect_timeout = 300ms}, server.port());
  std::promise<void> release;
  server_loop_.post([held = release.get_future().share()] { held.wait(); });
  const auto set = error_of([&] { store->set("k", "v"); });
  EXPECT_EQ(set.code(), ErrorCode::timeout);
  EXPECT_TRUE(std::string(set.what()).starts_with(at(server.port()) + " did not answer within "))
      << set.what();
  EXPECT_EQ(error_of([&] { (void)store->get("k", 10ms); }).code(), ErrorCode::timeout);
  release.set_value();
  EXPECT_EQ(store->get("k", 30s), "v");
}

std::shared_ptr<const SecretKey> key_of(std::string_view secret) {
  return secret.empty() ? nullptr : SecretKey::from_random(secret);
}

TEST_F(TcpStoreTest, WrongSecretsAreRefusedBothWays) {
  TcpStoreServer guarded(server_loop_, {.key = key_of("right")});
  TcpStoreServer open(server_loop_, {});
  const auto refused = [&](const char* secret, std::uint16_t port, const std::string& why) {
    const auto error = error_of([&] { client({.key = key_of(secret)}, port); });
    EXPECT_EQ(error.code(), ErrorCode::unauthenticated);
    EXPECT_EQ(error.what(), at(port) + " refuses this client: " + why);
  };
  refused("wrong", guarded.port(), "the secrets differ");
  refused("", guarded.port(), "it demands a secret and this client has none");
  refused("right", open.port(), "it has no secret and this client demands one");
  client({.key = key_of("right")}, guarded.port())->set("k", "v");
}

TEST_F(TcpStoreTest, AnotherJobIsRefusedWithBothNames) {
  TcpStoreServer server(server_loop_, {.job = "theirs"});
  const auto error = error_of([&] { client({.job = "ours"}, server.port()); });
  EXPECT_EQ(error.code(), ErrorCode::protocol);
  EXPECT_EQ(error.what(),
            at(server.port()) + " refuses this client of job \"ours\": it serves job \"theirs\"");
}

TEST_F(TcpStoreTest, AServerWithASecretDoesNotNameItsJob) {
  TcpStoreServer server(server_loop_, {.job = "theirs", .key = key_of("right")});
  for (const char* secret : {"right", "wrong", ""}) {
    const auto error =
        error_of([&] { client({.job = "ours", .key = key_of(secret)}, server.port()); });
    EXPECT_EQ(error.code(), ErrorCode::protocol);
    EXPECT_EQ(error.what(),
              at(server.port()) + " refuses this client of job \"ours\": it serves another job");
  }
}

TEST_F(TcpStoreTest, AnotherVersionIsRefusedWithBothNumbers) {
  TcpStoreServer server(server_loop_, {});
  Socket socket;
  socket.connect(server.port());
  base::Bytes hello = StoreHandshake(StoreHandshake::Role::client, "", nullptr).hello();
  hello.data()[4] = std::byte{9};
  socket.send(kStoreMagic);
  socket.send_frame(hello);
  EXPECT_EQ(socket.receive(kStoreMagic.size()), kStoreMagic);
  const std::string answer = socket.receive_frame();
  EXPECT_NE(answer.find("version 9"), std::string::npos) << answer;
  EXPECT_TRUE(socket.hung_up());
}

TEST_F(TcpStoreTest, APortThatCannotBeBoundIsNamed) {
  Socket foreign;
  const std::uint16_t port = foreign.bind();
  foreign.listen();
  const auto error = error_of([&] { TcpStoreServer(server_loop_, {.port = port}); });
  EXPECT_EQ(error.code(), ErrorCode::disconnected);
  EXPECT_EQ(error.what(), at(port) + " cannot listen: address already in use");
}

TEST_F(TcpStoreTest, AForeignListenerOnTheFirstPortIsSkipped) {
  for (const bool talks : {false, true}) {
    Socket foreign;
    const std::uint16_t port = foreign.bind();
    foreign.listen();
    std::jthread chatter([&] {
      if (!talks) return;
      Socket socket = foreign.accept();
      socket.send("HTTP/1.1 400 Bad Request\r\n\r\n");
      EXPECT_TRUE(socket.hung_up());
    });
    const TcpStoreOptions options{.port = port, .port_span = 20, .job = "ours"};
    TcpStoreServer server(server_loop_, options);
    EXPECT_GT(server.port(), port);
    const auto store = make_tcp_store(loop_, options);
    store->set("k", "v");
    EXPECT_EQ(store->describe(), at(server.port()));
  }
}

TEST_F(TcpStoreTest, JobsThatShareASpanOfPortsFindTheirOwnServers) {
  TcpStoreOptions ours{.port_span = 20, .job = "ours"};
  {
    Socket free;
    ours.port = free.bind();
  }
  TcpStoreOptions theirs = ours;
  theirs.job = "theirs";
  TcpStoreServer first(server_loop_, theirs);
  TcpStoreServer second(server_loop_, ours);
  EXPECT_NE(first.port(), second.port());
  EXPECT_EQ(make_tcp_store(loop_, theirs)->describe(), at(first.port()));
  EXPECT_EQ(make_tcp_store(loop_, ours)->describe(), at(second.port()));
}

TEST_F(TcpStoreTest, AMalformedMessageClosesOnlyItsOwnConnection) {
  TcpStoreServer server(server_loop_, {});
  const auto good = client({}, server.port());
  good->set("k", "v");

  Socket stranger;
  stranger.connect(server.port());
  stranger.send("GET / HTTP/1.1\r\n\r\n");
  EXPECT_TRUE(stranger.hung_up());

  Socket boaster = raw_client({}, server.port());
  boaster.send("\xff\xff\xff\xff");
  EXPECT_TRUE(boaster.hung_up());

  Socket early_boaster;
  early_boaster.connect(server.port());
  early_boaster.send(kStoreMagic);
  early_boaster.send(std::string("\x01\x00\x10\x00", 4));
  EXPECT_TRUE(early_boaster.hung_up());

  Socket unknown = raw_client({}, server.port());
  unknown.send_frame(request(1, static_cast<StoreOperation>(77), "k"));
  EXPECT_TRUE(unknown.hung_up());

  Socket counter = raw_client({}, server.port());
  base::Bytes wait;
  base::ByteWriter writer(wait);
  writer.write(std::uint64_t{1});
  writer.write(StoreOperation::wait);
  writer.write(std::uint32_t{0xffffffff});
  counter.send_frame(wait);
  EXPECT_TRUE(counter.hung_up());

  EXPECT_EQ(good->get("k", 10s), "v");
}

TEST_F(TcpStoreTest, WaitsNeedNoThread) {
  TcpStoreServer server(server_loop_, {});
  const auto store = client({}, server.port());
  std::vector<Socket> waiters;
  for (int i = 0; i < 100; ++i) waiters.push_back(raw_client({}, server.port()));
  const int before = threads_here();
  for (Socket& waiter : waiters) {
    for (std::uint64_t id = 0; id < 10; ++id) waiter.send_frame(get_request(id, "later", 1h));
    waiter.send_frame(get_request(99, "now", 0ms));
    EXPECT_NE(waiter.receive_frame().find("key \"now\" was not set within 0 ms"),
              std::string::npos);  // so the others wait
  }
  EXPECT_EQ(threads_here(), before);
  waiters.resize(50);  // half of them close
  store->set("later", "here");
  for (Socket& waiter : waiters) {
    std::vector<bool> answered(10);
    for (int i = 0; i < 10; ++i) {
      const std::string reply = waiter.receive_frame();
      ASSERT_EQ(reply.size(), 8u + 1 + 4 + 4);
      EXPECT_TRUE(reply.ends_with("here"));
      answered[static_cast<std::size_t>(reply[0])] = true;
    }
    EXPECT_EQ(std::count(answered.begin(), answered.end(), true), 10);
  }
}

TEST_F(TcpStoreTest, AClientThatDoesNotReadItsRepliesStopsOnlyItself) {
  TcpStoreServer server(server_loop_, {});
  const auto store = client({}, server.port());
  const std::string large(std::size_t{1} << 20, 'x');
  store->set("large", large);
  Socket greedy = raw_client({}, server.port());
  constexpr std::uint64_t kGets = 200;
  for (std::uint64_t id = 0; id < kGets; ++id) greedy.send_frame(get_request(id, "large", 0ms));
  store->set("k", "v");
  EXPECT_EQ(store->get("k", 30s), "v");
  for (std::uint64_t id = 0; id < kGets; ++id)
    ASSERT_EQ(greedy.receive_frame().size(), 8 + 1 + 4 + large.size());
}

TEST_F(TcpStoreTest, BlockingOnTheThreadOfTheLoopIsRefused) {
  TcpStoreServer server(server_loop_, {});
  const auto store = client({}, server.port());
  std::promise<Error> error;
  loop_.post([&] { error.set_value(error_of([&] { store->set("k", "v"); })); });
  EXPECT_EQ(error.get_future().get().code(), ErrorCode::invalid_argument);
}

TEST_F(TcpStoreTest, AClosedLoopIsReported) {
  TcpStoreServer server(server_loop_, {});
  base::EventLoop closed("closed loop");
  closed.close();
  TcpStoreOptions options{.port = server.port()};
  EXPECT_EQ(error_of([&] { (void)make_tcp_store(closed, options); }).code(),
            ErrorCode::disconnected);
  EXPECT_EQ(error_of([&] { TcpStoreServer(closed, {}); }).code(), ErrorCode::disconnected);
}

}  // namespace
}  // namespace stitch::transport::tcp_store_test
