// What only stitch's own endpoint can show: addresses, and many connections.
#include "stitch/transport/stream/stream_endpoint.h"
#include "stitch/transport/stream/tcp_link.h"
#include "tests/support/plain_test.h"
#include "tests/transport/plain_socket.h"
#include "tests/transport/raw_peer.h"

namespace stitch::transport::stream_endpoint_test {
namespace {

using std::chrono::milliseconds;
using stitch::testing::error_of;

StreamOptions over(std::vector<std::string> transports,
                   const std::string& bind_address = "127.0.0.1") {
  return {std::move(transports), bind_address};
}

class StreamEndpointOver : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Stream, StreamEndpointOver, ::testing::Values("shm", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

TEST(StreamEndpoint, EveryAddressItReturnsCanBeConnectedTo) {
  const auto server = make_stream_endpoint(options(1), over({"shm", "tcp", "shm"}));
  const auto client = make_stream_endpoint(options(2), over({"tcp", "shm"}));
  const auto addresses = server->listen([&] { return std::make_shared<Recorder>()->events(); });
  ASSERT_EQ(addresses.size(), 2U);
  EXPECT_TRUE(addresses[0].starts_with("shm://stitch-" + std::to_string(::getpid())))
      << addresses[0];
  EXPECT_TRUE(addresses[1].starts_with("tcp://127.0.0.1:")) << addresses[1];
  for (const auto& address : addresses) {
    const auto out = std::make_shared<Recorder>();
    const auto connection = client->connect(address, {1}, out->events());
    EXPECT_TRUE(out->wait_open()) << out->closed_text();
    EXPECT_EQ(connection->describe(), address);
  }
  EXPECT_EQ(error_of([&] {
              static_cast<void>(server->listen([] { return ConnectionEvents{}; }));
            }).code(),
            ErrorCode::invalid_argument);
}

TEST(StreamEndpoint, ClosesTheAddressesThatItDoesNotNeed) {
  const auto server =
      make_stream_endpoint(options(1), {{"shm", "tcp"}, "127.0.0.1", {"127.0.0.2"}});
  const auto bound = server->bind();
  ASSERT_EQ(bound.size(), 3U);
  EXPECT_TRUE(bound[2].starts_with("tcp://127.0.0.2:")) << bound[2];
  server->become(options(1).self, {bound[0], bound[2]});
  EXPECT_EQ(server->listen([] { return std::make_shared<Recorder>()->events(); }),
            (std::vector<std::string>{bound[0], bound[2]}));
  const auto client = make_stream_endpoint(options(2), over({"tcp"}));
  const auto closed = std::make_shared<Recorder>();
  const auto open = std::make_shared<Recorder>();
  const auto refused = client->connect(bound[1], {1}, closed->events());
  const auto taken = client->connect(bound[2], {1}, open->events());
  EXPECT_TRUE(closed->wait_closed());
  EXPECT_TRUE(refused->no_process_listens());
  EXPECT_TRUE(open->wait_open());
}

TEST(StreamEndpoint, WrongAddressesAreReportedWithTheReason) {
  const auto endpoint = make_stream_endpoint(options(1), over({"shm", "tcp"}));
  const std::vector<std::pair<std::string, std::string>> cases{
      {"nonsense", "does not look like"},
      {"", "does not look like"},
      {"ibv://1", "transport \"ibv\" is not in use here; in use: shm, tcp"},
      {"uv://127.0.0.1:1", "transport \"uv\" is not in use here"},
      {"tcp://", "not a numeric address"},
      {"tcp://localhost:80", "not a numeric address"},
      {"tcp://127.0.0.1", "not a numeric address"},
      {"tcp://127.0.0.1:0", "not a numeric address"},
      {"tcp://127.0.0.1:65536", "not a numeric address"},
      {"tcp://127.0.0.1:1", "refused"},
      {"shm://", "empty or longer than 100"},
      {"shm://" + std::string(101, 'n'), "empty or longer than 100"},
      {"shm://" + std::string(5000, 'n'), "empty or longer than 100"},
      {"shm://" + std::string(100, 'n'), "refused"},
      {"shm://unused", "refused"},
  };
  for (const auto& [address, expected] : cases) {
    const auto recorder = std::make_shared<Recorder>();
    endpoint->connect(address, {1}, recorder->events())->send(make_message("m"), recorder->done());
    ASSERT_TRUE(recorder->wait_closed()) << address;
    EXPECT_EQ(recorder->closed_code(), ErrorCode::disconnected) << address;
    EXPECT_TRUE(recorder->closed_text().starts_with("connect to \"" + address + "\" failed: "))
        << recorder->closed_text();
    EXPECT_NE(recorder->closed_text().find(expected), std::string::npos) << recorder->closed_text();
    EXPECT_TRUE(recorder->wait_sends_done());
    EXPECT_EQ(recorder->failed(), 1U);
  }
}

TEST(StreamEndpoint, WrongOptionsAreRefused) {
  Error error = error_of([] { static_cast<void>(make_stream_endpoint(options(1), over({"uv"}))); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_STREQ(error.what(), "transport \"uv\" is unknown; known are: shm, tcp");
  error = error_of([] { static_cast<void>(make_stream_endpoint(options(1), over({}))); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  error = error_of(
      [] { static_cast<void>(make_stream_endpoint(options(1), over({"tcp"}, "localhost"))); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_NE(std::string(error.what()).find("\"localhost\""), std::string::npos);
}

TEST(StreamEndpoint, AnAddressOfAnotherHostCannotBeBound) {
  const auto endpoint = make_stream_endpoint(
      options(1), over({"tcp"}, "192.0.2.1"));  // reserved for documentation: no host has it
  const Error error =
      error_of([&] { static_cast<void>(endpoint->listen([] { return ConnectionEvents{}; })); });
  EXPECT_EQ(error.code(), ErrorCode::disconnected);
  EXPECT_NE(std::string(error.what()).find("192.0.2.1"), std::string::npos) << error.what();
}

TEST(StreamEndpoint, SpeaksIpv6) {
  try {
    IpAddress::parse("::1", 0)->check_bindable("::1");
  } catch (const Error&) {
    GTEST_SKIP() << "this host has no IPv6";
  }
  const auto server = make_stream_endpoint(options(1), over({"tcp"}, "::1"));
  const auto client = make_stream_endpoint(options(2), over({"tcp"}));
  const auto in = std::make_shared<Recorder>();
  const auto addresses = server->listen([&] { return in->events(); });
  EXPECT_TRUE(addresses[0].starts_with("tcp://[::1]:")) << addresses[0];
  client->connect(addresses[0], {1}, {})->send(make_message("six"), nullptr);
  EXPECT_TRUE(in->wait_messages(1));
}

// The system reports an error of a socket once: to the writer, if that asks first. The reader,
// which ends the connection, must report it, too.
TEST(StreamEndpoint, AResetIsReportedWhicheverThreadSeesItFirst) {
  Socket listener;
  const std::uint16_t port = listener.bind();
  listener.listen();
  for (const bool write_first : {true, false}) {
    Socket ours;
    ours.connect(port);
    const auto link = make_tcp_link(base::Descriptor(::dup(ours.file())));
    {
      const Socket theirs = listener.accept();
      const linger reset{1, 0};
      ASSERT_EQ(::setsockopt(theirs.file(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset)), 0);
    }
    pollfd event{ours.file(), POLLIN, 0};
    ASSERT_EQ(::poll(&event, 1, 5000), 1);
    std::array<char, 10> some{};
    const iovec part{some.data(), some.size()};
    if (write_first) {
      EXPECT_EQ(link->write({&part, 1}), 0U);
    }
    EXPECT_EQ(link->read({&part, 1}), 0U);
    const auto error = link->ended();
    ASSERT_TRUE(error.has_value());
    EXPECT_STREQ(error->what(), std::strerror(ECONNRESET));
  }
}

// When no process listens, a connecting socket may be given the very port that it connects to.
TEST(StreamEndpoint, ASocketThatMeetsItselfIsNoPeer) {
  Socket self;
  self.connect(self.bind());
  EXPECT_TRUE(connects_itself(self.file()));
  Socket listener, other;
  const std::uint16_t port = listener.bind();
  listener.listen();
  other.connect(port);
  EXPECT_FALSE(connects_itself(other.file()));
}

TEST_P(StreamEndpointOver, RefusesToSendDeviceMemory) {
  const auto endpoint = make_stream_endpoint(options(1), over({GetParam()}));
  const auto in = std::make_shared<Recorder>();
  const auto out = std::make_shared<Recorder>();
  const auto addresses = endpoint->listen([&] { return in->events(); });
  const auto connection = endpoint->connect(addresses[0], {1}, out->events());
  int elsewhere = 0;
  for (const bool open : {false, true}) {
    if (open) {
      ASSERT_TRUE(out->wait_open());
    }
    Message message = make_message("m");
    message.buffers.push_back(make_filled_buffer(10, 1));
    message.buffers.push_back(
        Buffer{Device{DeviceType::cuda, 1}, &elsewhere, sizeof(elsewhere), nullptr});
    connection->send(std::move(message), out->done());
    ASSERT_TRUE(out->wait_sends_done());
    EXPECT_EQ(out->send_error()->code(), ErrorCode::unimplemented);
    EXPECT_NE(std::string(out->send_error()->what()).find("cuda:1"), std::string::npos);
  }
  connection->send(make_message("still open"), out->done());
  ASSERT_TRUE(in->wait_messages(1));
  EXPECT_EQ(in->take_texts().front(), "still open");
}

std::size_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

TEST_P(StreamEndpointOver, HundredsOfConnectionsOpenAndClose) {
  const auto server = make_stream_endpoint(options(1), over({GetParam()}));
  const auto client = make_stream_endpoint(options(2), over({GetParam()}));
  const auto addresses = server->listen(&echo_events);
  const std::size_t before = open_descriptors();
  for (int round = 0; round < 8; ++round) {
    std::vector<std::shared_ptr<Recorder>> recorders(50);
    for (auto& each : recorders) {
      each = std::make_shared<Recorder>();
      client->connect(addresses[0], {1}, each->events())->send(make_message("m"), each->done());
    }
    for (const auto& each : recorders) ASSERT_TRUE(each->wait_messages(1)) << each->closed_text();
    for (const auto& each : recorders)
      each->connection()->close(Error(ErrorCode::cancelled, "enough"));
    for (const auto& each : recorders) {
      ASSERT_TRUE(each->wait_closed());
      EXPECT_TRUE(each->faults().empty());
    }
    EXPECT_TRUE(wait_until([&] { return open_descriptors() <= before; }))
        << open_descriptors() << " descriptors, " << before << " before";
  }
}

// A thread that sends while another one writes leaves the message to that one: it must be written
// even if nothing is sent after it.
TEST_P(StreamEndpointOver, ThreadsThatWaitForTheirOwnEchoesAreNeverStuck) {
  constexpr std::size_t kThreads = 6;
  constexpr std::uint32_t kRounds = 4000;
  const auto server = make_stream_endpoint(options(1), over({GetParam()}));
  const auto client = make_stream_endpoint(options(2), over({GetParam()}));
  const auto addresses = server->listen(&echo_events);
  std::array<std::atomic<std::uint32_t>, kThreads> echoed{};
  std::atomic<bool> in_order{true};
  const auto out = std::make_shared<Recorder>();
  out->handle = [&](const std::shared_ptr<Connection>&, const Message& message) {
    std::uint32_t words[2];
    std::memcpy(words, message.frame.data(), sizeof(words));
    if (words[1] != echoed[words[0]].load() + 1) in_order = false;
    echoed[words[0]].store(words[1]);
    echoed[words[0]].notify_all();
  };
  const auto connection = client->connect(addresses[0], {1}, out->events());
  ASSERT_TRUE(out->wait_open());
  std::vector<std::thread> threads;
  for (std::uint32_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      std::minstd_rand random(thread + 1);
      for (std::uint32_t round = 1; round <= kRounds; ++round) {
        // The first one's are large; some come so late that the pollers have gone to sleep.
        Message message;
        message.frame.resize(thread == 0 && round % 16 == 0 ? 300'000 : 64);
        const std::uint32_t words[2] = {thread, round};
        std::memcpy(message.frame.data(), words, sizeof(words));
        connection->send(std::move(message), nullptr);
        while (echoed[thread].load() < round) echoed[thread].wait(round - 1);
        if (random() % 64 == 0)
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
      }
    });
  }
  EXPECT_TRUE(wait_until(
      [&] {
        return std::all_of(echoed.begin(), echoed.end(),
                           [](const auto& each) { return each.load() == kRounds; });
      },
      milliseconds(60000)))
      << "a message was sent and never arrived";
  if (::testing::Test::HasFailure()) std::abort();  // the threads would never end
  for (auto& thread : threads) thread.join();
  // The first one's large messages may be passed by its small ones, but it waits for each.
  EXPECT_TRUE(in_order.load());
}

TEST_P(StreamEndpointOver, SmallMessagesPassALargeOneAndTheirSendersDoNotWaitForIt) {
  const auto server = make_stream_endpoint(options(1), over({GetParam()}));
  const auto client = make_stream_endpoint(options(2), over({GetParam()}));
  const auto in = std::make_shared<Recorder>();
  std::atomic<int> small{0};
  std::atomic<int> small_before_large{-1};
  in->handle = [&](const std::shared_ptr<Connection>& from, Message message) {
    if (!message.buffers.empty()) {
      small_before_large = small.load();
    } else {
      ++small;
      from->send(std::move(message), nullptr);
    }
  };
  const auto addresses = server->listen([&] { return in->events(); });
  const auto out = std::make_shared<Recorder>();
  const auto connection = client->connect(addresses[0], {1}, out->events());
  ASSERT_TRUE(out->wait_open());
  std::thread large([&] {
    Message message = make_message("large");
    message.buffers.push_back(allocate_buffer(Device{}, std::size_t{256} << 20));
    connection->send(std::move(message), out->done());
  });
  for (std::size_t i = 1; small_before_large.load() < 0 && i < 1'000'000; ++i) {
    connection->send(make_message("small"), nullptr);
    EXPECT_TRUE(out->wait_messages(i));
    if (::testing::Test::HasFailure()) break;
  }
  large.join();
  EXPECT_TRUE(out->wait_sends_done());
  EXPECT_TRUE(wait_until([&] { return small_before_large.load() >= 0; }, milliseconds(20000)));
  // Each was sent after the one before had come back: with 256 MiB in front of them few would have.
  EXPECT_GT(small_before_large.load(), 20);
}

}  // namespace
}  // namespace stitch::transport::stream_endpoint_test
